#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <initializer_list>
#include <optional>

namespace fsdp {

/// Lets all-gathers wait for an event behind the optimizer's writes instead of for all that is queued on
/// the current stream, by launching them on another stream. Where there are no streams it does nothing.
///
/// Not thread-safe: the root's lock guards it.
class GatherStream {
 public:
  /// While it lives that other stream is the current one; without an event it changes nothing.
  class Beside {
   public:
    Beside() = default;
    explicit Beside(c10::Stream stream) : guard_(std::in_place, stream) {}
    /// The current stream of before goes on behind what has been queued here, and `buffers`, made here, are
    /// its to use.
    void hand_over(std::initializer_list<const at::Tensor*> buffers) const;

   private:
    std::optional<c10::StreamGuard> guard_;
  };

  void set_event(c10::Event event) { event_.emplace(std::move(event)); }
  void drop_event() { event_.reset(); }
  [[nodiscard]] Beside enter(c10::Device device);

 private:
  std::optional<c10::Event> event_;
  std::optional<c10::Stream> stream_;  // from the device's pool; one for the root's life
};

}  // namespace fsdp
