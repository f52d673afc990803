#pragma once
// See context.h in this folder. Nothing of gloo/algorithm.h is used.
