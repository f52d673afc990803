#include "comm/bounded_store.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <type_traits>
#include <utility>

#include "comm/bounded_calls.hpp"

namespace fsdp {
namespace {

using std::chrono::milliseconds;
using Bytes = std::vector<uint8_t>;
using Keys = std::vector<std::string>;

class BoundedStore final : public c10d::Store {
 public:
  BoundedStore(c10::intrusive_ptr<c10d::Store> inner, milliseconds answers_within)
      : inner_(std::move(inner)), answers_within_(answers_within) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<BoundedStore>(ask([](auto& store) { return store.clone(); }), answers_within_);
  }

  using Store::compareSet;
  using Store::set;
  void set(const std::string& key, const Bytes& value) override {
    ask([key, value](auto& store) { store.set(key, value); });
  }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return ask([key, expected, desired](auto& store) { return store.compareSet(key, expected, desired); });
  }
  Bytes get(const std::string& key) override {
    return ask([key](auto& store) { return store.get(key); }, getTimeout());
  }
  int64_t add(const std::string& key, int64_t value) override {
    return ask([key, value](auto& store) { return store.add(key, value); });
  }
  bool deleteKey(const std::string& key) override {
    return ask([key](auto& store) { return store.deleteKey(key); });
  }
  bool check(const Keys& keys) override {
    return ask([keys](auto& store) { return store.check(keys); });
  }
  int64_t getNumKeys() override {
    return ask([](auto& store) { return store.getNumKeys(); });
  }
  void wait(const Keys& keys) override { wait(keys, getTimeout()); }
  void wait(const Keys& keys, const milliseconds& timeout) override {
    ask([keys, timeout](auto& store) { store.wait(keys, timeout); }, timeout);
  }
  void append(const std::string& key, const Bytes& value) override {
    ask([key, value](auto& store) { store.append(key, value); });
  }
  std::vector<Bytes> multiGet(const Keys& keys) override {
    return ask([keys](auto& store) { return store.multiGet(keys); }, getTimeout());
  }
  void multiSet(const Keys& keys, const std::vector<Bytes>& values) override {
    ask([keys, values](auto& store) { store.multiSet(keys, values); });
  }

  // What the client says by itself.
  bool hasExtendedApi() const override { return inner_->hasExtendedApi(); }
  const milliseconds& getTimeout() const noexcept override { return inner_->getTimeout(); }
  void setTimeout(const milliseconds& timeout) override { inner_->setTimeout(timeout); }

  milliseconds answers_within() const { return answers_within_; }
  const c10::intrusive_ptr<c10d::Store>& inner() const { return inner_; }

 private:
  template <class Question>
  std::invoke_result_t<Question, c10d::Store&> ask(Question question, milliseconds waits_for_key = {}) {
    return calls_.within(waits_for_key + answers_within_,
                         [inner = inner_, question = std::move(question)] { return question(*inner); });
  }

  const c10::intrusive_ptr<c10d::Store> inner_;
  const milliseconds answers_within_;
  BoundedCalls calls_{"the rendezvous store"};
};

bool is_bounded(const c10::intrusive_ptr<c10d::Store>& store, milliseconds answers_within) {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  const auto below = prefixed != nullptr ? prefixed->getUnderlyingNonPrefixStore() : store;
  const auto* bounded = dynamic_cast<const BoundedStore*>(below.get());
  return bounded != nullptr && bounded->answers_within() <= answers_within;
}

}  // namespace

c10::intrusive_ptr<c10d::Store> inside_bounded_store(const c10::intrusive_ptr<c10d::Store>& store) {
  const auto* bounded = dynamic_cast<const BoundedStore*>(store.get());
  return bounded != nullptr ? bounded->inner() : c10::intrusive_ptr<c10d::Store>();
}

c10::intrusive_ptr<c10d::Store> bounded_store(c10::intrusive_ptr<c10d::Store> store, milliseconds answers_within) {
  if (is_bounded(store, answers_within)) return store;
  return c10::make_intrusive<BoundedStore>(std::move(store), answers_within);
}

}  // namespace fsdp
