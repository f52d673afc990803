#pragma once

#include <condition_variable>
#include <mutex>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace fsdp::test {

/// A store that can be cut off: calls then hang until it is reached again.
class SilentStore final : public c10d::HashStore {
 public:
  void cut() { set_reached(false); }
  void mend() { set_reached(true); }

  using Store::compareSet;
  using Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    await();
    HashStore::set(key, value);
  }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    await();
    return HashStore::compareSet(key, expected, desired);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    await();
    return HashStore::get(key);
  }
  bool check(const std::vector<std::string>& keys) override {
    await();
    return HashStore::check(keys);
  }

 private:
  void await() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_reached_; });
  }
  void set_reached(bool value) {
    {
      std::lock_guard lock(mutex_);
      is_reached_ = value;
    }
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_reached_ = true;
};

}  // namespace fsdp::test
