#include "comm/notice_board.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/require.hpp"
#include "comm/c10d/store_server.hpp"
#include "comm/watch/rank_watch.hpp"

namespace fsdp {

int NoticeBoard::number(const std::string& name) {
  std::lock_guard lock(local_mutex_);
  return numbers_[name]++;
}

std::shared_ptr<RankWatch> NoticeBoard::rank_watch(int rank) {
  std::lock_guard lock(local_mutex_);
  auto& watch = watches_[rank];
  if (!watch) {
    watch = find_watch(rank);
    watch->add(weak_from_this());
  }
  return watch;
}

std::shared_ptr<RankWatch> NoticeBoard::find_watch(int rank) { return std::make_shared<RankWatch>(rank); }

std::shared_ptr<NoticeBoard> notice_board_of(Communicator& group) {
  auto* owner = dynamic_cast<HasNoticeBoard*>(&group);
  return owner != nullptr ? owner->notice_board() : nullptr;
}

namespace {

class ThreadNoticeBoard final : public NoticeBoard {
 public:
  explicit ThreadNoticeBoard(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  void post(const std::string& key, const std::string& note) override {
    std::lock_guard lock(mutex_);
    notes_[key] = note;
  }
  std::string post_first(const std::string& key, const std::string& note) override {
    std::lock_guard lock(mutex_);
    return notes_.try_emplace(key, note).first->second;
  }
  std::optional<std::string> read(const std::string& key) override {
    std::lock_guard lock(mutex_);
    const auto found = notes_.find(key);
    if (found == notes_.end()) return std::nullopt;
    return found->second;
  }
  std::chrono::milliseconds timeout() const override { return timeout_; }

 private:
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::map<std::string, std::string> notes_;
};

class StoreNoticeBoard final : public NoticeBoard {
 public:
  StoreNoticeBoard(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds answers_within)
      : timeout_(store->getTimeout()),
        server_port_(server_port_of(store)),
        shared_(bounded_store(std::move(store), answers_within)) {}

  void post(const std::string& key, const std::string& note) override {
    own().set(key, std::vector<uint8_t>(note.begin(), note.end()));
  }
  std::string post_first(const std::string& key, const std::string& note) override {
    return own().compareSet(key, std::string(), note);
  }
  std::optional<std::string> read(const std::string& key) override {
    // Notes are never removed: what is there stays until it is read.
    if (!own().check({key})) return std::nullopt;
    const auto note = own().get(key);
    return std::string(note.begin(), note.end());
  }
  std::chrono::milliseconds timeout() const override { return timeout_; }

 protected:
  /// A process may have several worlds, as each process group of Python is one; what it does is the same for all of them.
  std::shared_ptr<RankWatch> find_watch(int rank) override {
    static auto* mutex = new std::mutex;
    static auto* of_process = new std::map<int, std::shared_ptr<RankWatch>>;
    std::lock_guard lock(*mutex);
    auto& watch = (*of_process)[rank];
    if (!watch) watch = std::make_shared<RankWatch>(rank);
    return watch;
  }

 private:
  /// Connected at the first use: most often by a thread that nobody waits for. The connection is
  /// another one than that of the group's own rendezvous, which may hold it for minutes.
  c10d::Store& own() {
    std::lock_guard lock(mutex_);
    if (server_port_ && has_server_ended(*server_port_))
      throw CommError("its server, most often in the process of rank 0, has ended");
    if (!own_) {
      own_ = c10::make_intrusive<c10d::PrefixStore>("notices", shared_->clone());
      own_->setTimeout(timeout_);
    }
    return *own_;
  }

  const std::chrono::milliseconds timeout_;
  const std::optional<uint16_t> server_port_;
  std::mutex mutex_;
  c10::intrusive_ptr<c10d::Store> shared_, own_;
};

}  // namespace

std::shared_ptr<NoticeBoard> thread_notice_board(std::chrono::milliseconds timeout) {
  return std::make_shared<ThreadNoticeBoard>(timeout);
}

std::shared_ptr<NoticeBoard> store_notice_board(c10::intrusive_ptr<c10d::Store> store,
                                                std::chrono::milliseconds answers_within) {
  return std::make_shared<StoreNoticeBoard>(std::move(store), answers_within);
}

}  // namespace fsdp
