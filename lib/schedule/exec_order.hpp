#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace fsdp {

/// The order in which one kind of pass (forward, or backward) uses groups: learned in one pass,
/// followed in the next, noticed when it changes. Pure bookkeeping over group numbers: what it
/// says depends on the sequence of uses alone, never on time, so it is the same on all ranks.
///
/// A pass that starts over before it ends (two forwards, then one backward) follows as well.
class ExecOrder {
 public:
  /// A new pass starts. Ends the one under way, if any.
  void begin_pass();
  /// The pass is over: if it went another way than the learned one, it is the learned one now.
  void end_pass();
  /// The pass did not come to its end (an exception): what it recorded is dropped.
  void abandon_pass();
  /// Forgets everything.
  void clear();

  enum class Progress { kGoesOn, kStartedOver };
  /// What comes behind the learned pass, and begins as it does: that pass again, or an order that is another one.
  enum class Repeats { kAsLearned, kAnotherOrder };
  /// The next use in this pass. Uses of the same group in a row count once. operands: all groups that its operator uses at
  /// once; none: it alone. Says when the learned pass is over and begins again.
  Progress use(int group, std::span<const int> operands = {}, Repeats repeats = Repeats::kAsLearned);
  /// Whether one of these uses, in their order, would say kStartedOver.
  bool would_start_over(std::span<const int> groups, Repeats repeats) const;

  /// True if there is a learned order and this pass has kept to it so far.
  bool follows() const { return follows_; }

  /// Only while `follows()`. How far ahead the next use of `group` lies in the learned pass;
  /// nullopt if it is not used again.
  std::optional<size_t> distance_to_next_use(int group) const;
  /// Only while `follows()`. The next distinct groups after the present use, nearest first, at most `count`. Good until it is
  /// asked again.
  const std::vector<int>& upcoming(size_t count) const;

  /// Only while `follows()`. Where in the learned pass the group has been used last; nullopt if not yet.
  std::optional<size_t> last_use(int group) const;

  const std::vector<int>& learned() const { return learned_; }
  /// Which groups operators use beside the one of a learned use.
  struct Beside {
    size_t use = 0;  ///< position in `learned()`
    int group = 0;
    bool operator==(const Beside&) const = default;
  };
  const std::vector<Beside>& learned_beside() const { return learned_beside_; }
  /// How many times an order has been learned: another number, another order.
  int generation() const { return lessons_; }

 private:
  void learn(std::vector<int> uses, std::vector<Beside> beside);
  bool recording_overflowed() const { return uses_.size() > kLongestPass; }

  // A loop that runs forward for ever and never backward must not fill the memory.
  static constexpr size_t kLongestPass = 1 << 20;

  std::vector<int> learned_;
  std::vector<Beside> learned_beside_;
  std::vector<size_t> next_same_;            // position of the same group's next use; size() if none
  std::vector<std::optional<size_t>> first_;  // by group: its first position
  std::vector<std::optional<size_t>> last_seen_;  // by group: its latest position in this pass
  std::vector<int> uses_;                    // this pass, as it went
  std::vector<Beside> beside_;
  mutable std::vector<int> upcoming_;        // the last answer: asked several times a group and step
  size_t position_ = 0;                      // uses so far, within the learned pass
  int lessons_ = 0;
  bool follows_ = false;
  bool in_pass_ = false;
};

}  // namespace fsdp
