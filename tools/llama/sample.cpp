#include "sample.hpp"

#include "data.hpp"

namespace llama {
namespace {

constexpr int64_t kPromptBytes = 48;

std::string choose_prompt(const std::string& text) {
  const auto line = text.find('\n', text.size() / 2);
  const auto start =
      line == std::string::npos || line + 1 + kPromptBytes > text.size() ? 0 : line + 1;
  return text.substr(start, kPromptBytes);
}

/// Logits of the byte that follows `text`.
torch::Tensor next_logits(Execution& execution, const ModelConfig& model, const std::string& text) {
  const auto seen = std::min<int64_t>(static_cast<int64_t>(text.size()), model.context);
  const auto tokens = torch::empty({1, seen}, torch::kLong);
  for (int64_t i = 0; i < seen; ++i)
    tokens.data_ptr<int64_t>()[i] =
        static_cast<unsigned char>(text[text.size() - static_cast<size_t>(seen - i)]);
  return execution.predict(tokens.to(execution.device())).select(1, seen - 1).flatten().cpu();
}

/// The byte at which the summed probabilities pass `position`, in [0, 1).
int64_t pick(const torch::Tensor& logits, double temperature, double position) {
  if (temperature == 0) return logits.argmax().item<int64_t>();
  const auto sums = torch::softmax(logits.to(torch::kDouble) / temperature, 0).cumsum(0);
  return std::min<int64_t>((sums <= position).sum().item<int64_t>(), logits.numel() - 1);
}

/// Bytes of the UTF-8 character that starts at `text[i]`; 0 if none does.
size_t character_bytes(const std::string& text, size_t i) {
  const auto byte = static_cast<unsigned char>(text[i]);
  if (byte == '\n' || byte == '\t' || (byte >= 0x20 && byte < 0x7f)) return 1;
  const size_t length = byte >= 0xf5   ? 0
                        : byte >= 0xf0 ? 4
                        : byte >= 0xe0 ? 3
                        : byte >= 0xc3 ? 2  // 0xc2 starts control characters, too
                                       : 0;
  if (length == 0 || i + length > text.size()) return 0;
  for (size_t k = 1; k < length; ++k)
    if ((static_cast<unsigned char>(text[i + k]) & 0xc0) != 0x80) return 0;
  return length;
}

}  // namespace

Sample generate(Execution& execution, const ModelConfig& model, const std::string& text,
                const OutputOptions& options, uint64_t seed) {
  Sample sample{choose_prompt(text), {}};
  auto whole = sample.prompt;
  for (int64_t i = 0; i < options.sample_bytes; ++i) {
    const auto logits = next_logits(execution, model, whole);
    const auto byte = pick(logits, options.temperature, uniform(seed, static_cast<uint64_t>(i)));
    // Ranks on unlike machines may round differently, and must still see one text.
    whole += static_cast<char>(execution.from_rank0(byte));
  }
  sample.continuation = whole.substr(sample.prompt.size());
  return sample;
}

std::string printable(const std::string& text) {
  std::string shown;
  for (size_t i = 0; i < text.size();) {
    const auto length = character_bytes(text, i);
    shown += length == 0 ? "?" : text.substr(i, length);
    i += std::max<size_t>(length, 1);
  }
  return shown;
}

}  // namespace llama
