#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace fsdp {

/// Longer than any answer of a store that is alive and can be reached.
constexpr std::chrono::milliseconds kStoreAnswersWithin{5000};

/// Wraps `store` so that its calls throw NoAnswer instead of waiting for ever for a server that does not answer any more: after
/// `answers_within`, and those that wait for a key so long after their own timeout. (c10d's client reads from its socket
/// without a limit.) A store whose calls wait no longer already, below prefixes too, is returned as it is.
c10::intrusive_ptr<c10d::Store> bounded_store(c10::intrusive_ptr<c10d::Store> store,
                                              std::chrono::milliseconds answers_within = kStoreAnswersWithin);

/// Returns the store that a bounded one wraps; null for any other store.
c10::intrusive_ptr<c10d::Store> inside_bounded_store(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace fsdp
