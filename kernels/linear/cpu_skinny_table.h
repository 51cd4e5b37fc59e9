// skinny_of(level), for sources that are compiled once.
#pragma once

#include "../cpu/levels.h"
#include "cpu_skinny.h"

EASYTORCH_TABLE(SkinnyFunctions, skinny)
