#pragma once
// See ../context.h. Nothing of gloo/common/error.h is used.
