#pragma once

#include <string>

namespace llama {

/// Writes why this rank fails to the file that torchrun has named for it (TORCHELASTIC_ERROR_FILE), so that whoever started
/// torchrun can tell. Only the first message goes there. False: torchrun has named no file, or it cannot be written.
bool write_error_file(const std::string& message);

}  // namespace llama
