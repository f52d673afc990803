#pragma once

#include <string>

namespace fsdp {

/// Puts what an error says into the notation of another language: errors are written for C++ programs, and a binding's users
/// know its own names.
using Wording = std::string (*)(std::string text);

/// Sets the wording of all errors that are made from now on. nullptr, the default: as written. To be called before other
/// threads use the library.
void set_wording(Wording wording);

}  // namespace fsdp
