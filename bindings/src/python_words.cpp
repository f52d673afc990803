#include "python_words.hpp"

#include <array>
#include <cctype>
#include <string_view>
#include <utility>

namespace fsdp::python {

namespace {

struct Phrase {
  std::string_view cpp;
  std::string_view python;
};

// What is more than notation. A phrase stands before those that are a part of it.
constexpr std::array kPhrases = {
    Phrase{" afterwards, or call fsdp::adopt(optimizer)", " afterwards"},
    Phrase{"fsdp::unsharded(parameter) for this rank's gradient of the whole parameter, not reduced; or loss.backward()",
           "loss.backward()"},
    Phrase{"parameter.grad()", "parameter.grad"},
    Phrase{"add fsdp::initializer<Class>(function) for these classes to InitOptions::initializers",
           "add fsdp.initializer(Class, function) for these classes to the argument initializers"},
    Phrase{"fsdp::to_empty", "module.to_empty"},
    Phrase{"fsdp::full_tensor(parameter)", "parameter.full_tensor()"},
    Phrase{"fsdp::to_local(fsdp::sharded(parameter))", "parameter.to_local()"},
    Phrase{"fsdp::to_local(tensor)", "tensor.to_local()"},
    Phrase{"fsdp::to_local(parameter)", "parameter.to_local()"},
    Phrase{"fsdp::full_tensor(tensor)", "tensor.full_tensor()"},
    Phrase{"fsdp::to(module, ", "module.to("},
    Phrase{"fsdp::to:", "module.to:"},
    Phrase{"fsdp::to,", "module.to,"},
    Phrase{"model->parameters(), or fsdp::sharded(tensor)", "model.parameters()"},
    Phrase{"torch::NoGradGuard or fsdp::forward_scope", "torch.no_grad()"},
    Phrase{"a torch::NoGradGuard", "torch.no_grad()"},
};

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
}

bool is_word(char letter) { return letter == '_' || std::isalnum(static_cast<unsigned char>(letter)) != 0; }

/// Of the name that begins at `at`: torch::autograd::grad is torch.autograd.grad. Other names with "::" are operators and trace
/// ranges, which Python shows so, too.
void dot_name(std::string& text, size_t at) {
  while (at < text.size()) {
    while (at < text.size() && is_word(text[at])) ++at;
    if (text.compare(at, 2, "::") != 0 || at + 2 >= text.size() || !is_word(text[at + 2])) return;
    text.replace(at, 2, ".");
    ++at;
  }
}

void dot_names(std::string& text, std::string_view space) {
  for (size_t at = text.find(space); at != std::string::npos; at = text.find(space, at + 1))
    if (at == 0 || !is_word(text[at - 1])) dot_name(text, at);
}

}  // namespace

std::string in_python_words(std::string text) {
  if (text.find("::") == std::string::npos && text.find("->") == std::string::npos) return text;
  for (const Phrase& phrase : kPhrases) replace_all(text, phrase.cpp, phrase.python);
  dot_names(text, "fsdp::");
  dot_names(text, "torch::");
  return text;
}

}  // namespace fsdp::python
