#pragma once

#include <pthread.h>

#include <functional>
#include <string>

namespace fsdp {

/// Says where in the program a thread of this process is, "in full_tensor, called at train.py:33"; "": it cannot tell. Called
/// from any thread. One for the process, such as an interpreter's.
void set_whereabouts(std::function<std::string(pthread_t)> of_thread);
/// "" where nobody can tell.
std::string whereabouts(pthread_t thread);

}  // namespace fsdp
