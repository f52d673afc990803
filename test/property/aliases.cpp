#include "property/aliases.hpp"

namespace fsdp::test {
namespace {

/// A name, between quotes or first, that `name` is, or ends with: fully_shard may have been called on a module inside.
bool is_named_in(const std::string& message, const std::string& name) {
  if (const auto first = message.substr(0, message.find(':')); name == first || name.ends_with("." + first)) return true;
  for (size_t begin = message.find('\''); begin != std::string::npos; begin = message.find('\'', begin + 1)) {
    const auto quoted = message.substr(begin + 1, message.find('\'', begin + 1) - begin - 1);
    if (!quoted.empty() && (name == quoted || name.ends_with("." + quoted))) return true;
  }
  return false;
}

}  // namespace

Aliases::Aliases(const RandomTree& tree, const torch::nn::Module& model, const std::vector<at::Tensor>& apart) {
  Draw draw(tree.seed * 141650939 + 23);
  for (const auto& [name, parameter] : unique_parameters(model)) {
    if (!draw.chance(tree.alias_probability) || is_among(parameter, apart)) continue;
    // Of a larger storage others may have other parts: it stays open, and the first step warns.
    if (parameter.storage().nbytes() > parameter.nbytes()) continue;
    auto way = static_cast<Way>(draw.number(0, kWays - 1));
    if (parameter.dim() == 0 && (way == Way::kView || way == Way::kPart)) way = Way::kDetached;
    aliases_.push_back({.name = name, .member = parameter, .way = way});
  }
}

at::Tensor Aliases::shown(Way way, const at::Tensor& parameter) {
  switch (way) {
    case Way::kDetached: return parameter.detach();
    case Way::kData: return parameter.data();
    case Way::kView: return parameter.transpose(0, -1);
    case Way::kPart: return parameter.narrow(0, 0, std::min<int64_t>(parameter.size(0), 1));
    case Way::kSetData: break;
  }
  auto other = torch::empty({0}, parameter.options());
  other.set_data(parameter.data());
  return other;
}

void Aliases::make() {
  for (auto& alias : aliases_) alias.tensor = shown(alias.way, alias.member);
}

void Aliases::read(const Rank& rank, const NamedTensors& registered, const std::string& when) const {
  const at::NoGradGuard no_grad;
  for (const auto& alias : aliases_) {
    const auto what = fmt::format("{}: what shows the memory of {} from before fully_shard", when, alias.name);
    const auto parameter = chosen(By::kSharded, registered, alias.name, alias.member);
    const auto now = is_fsdp_parameter(parameter) ? full_tensor(parameter) : parameter.detach();
    try {
      rank.check_identical(alias.tensor.clone(), shown(alias.way, now), what);
    } catch (const std::exception& error) {
      const auto message = message_of(error);
      rank.check(message.find("before fully_shard") != std::string::npos && is_named_in(message, alias.name), what + ": " + message);
    }
  }
}

SetDataTie SetDataTie::draw(const RandomTree& tree, const torch::nn::Module& model, const std::vector<at::Tensor>& cut) {
  if (!tree.ties_by_set_data) return {};
  Draw draw(tree.seed * 141650963 + 29);
  std::vector<SetDataTie> pairs;
  const auto all = unique_parameters(model);
  for (const auto& [first, a] : all)
    for (const auto& [second, b] : all) {
      if (&a == &b || a.sizes() != b.sizes() || a.strides() != b.strides() || a.numel() == 0) continue;
      if (!is_among(a, cut) && !is_among(b, cut)) pairs.push_back({.names = {first, second}, .first = a, .second = b});
    }
  return pairs.empty() ? SetDataTie() : draw.one_of(pairs);
}

void SetDataTie::make() const {
  if (is_there()) at::Tensor(first).set_data(second.data());
}

void SetDataTie::check_refused(const Rank& rank, const std::string& message) const {
  rank.check(is_named_in(message, names.first) && is_named_in(message, names.second),
             fmt::format("'{}' and '{}' show one memory: {}", names.first, names.second, message));
}

}  // namespace fsdp::test
