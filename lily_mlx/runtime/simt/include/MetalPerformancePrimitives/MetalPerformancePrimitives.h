#include "simt/mpp.h"
