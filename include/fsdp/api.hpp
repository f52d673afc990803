#pragma once

/// Marks what a program may use of libfsdp.so. A library that is built without tests, benchmarks and the Python package hides
/// everything else (docs/project/versioning.md).
#define FSDP_API __attribute__((visibility("default")))
