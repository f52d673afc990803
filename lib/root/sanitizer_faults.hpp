#pragma once

namespace fsdp {

class RootContext;

/// Between steps: throws StateError if the sanitizer mode has found something in the root's groups since the last call. In a
/// step does nothing: other ranks wait for what this one still has to launch. Takes the root's lock.
void throw_faults(RootContext& root);

}  // namespace fsdp
