#pragma once

#include <cstddef>
#include <new>

namespace fsdp {

/// Memory of objects that are made and gone by the thousand in each step: a thread keeps that of the last ones for the next.
/// The allocator's own cache holds seven of a size, and what goes past that costs several hundred instructions. T inherits it,
/// and is what `new` makes: no class derives from T. Not under the address sanitizer, which is to see what is gone.
template <class T>
class RecycledMemory {
 public:
#ifndef __SANITIZE_ADDRESS__
  static void* operator new(size_t bytes) {
    auto& list = List::of_thread;
    if (list.first == nullptr) return ::operator new(bytes);
    --list.count;
    auto* block = list.first;
    list.first = block->next;
    return block;
  }
  static void operator delete(void* memory) {
    static_assert(sizeof(T) >= sizeof(Block));
    auto& list = List::of_thread;
    if (list.count == kMost || list.is_over) return ::operator delete(memory);
    if (!list.has_cleaner) [[unlikely]] add_cleaner();
    ++list.count;
    list.first = new (memory) Block{list.first};
  }
#endif

 private:
  static constexpr int kMost = 1024;
  struct Block {
    Block* next;
  };
  /// Holds a thread's free blocks. It has no destructor: statics may let go of objects when a thread's variables are gone.
  struct List {
    Block* first = nullptr;
    int count = 0;
    bool has_cleaner = false, is_over = false;
    static thread_local constinit List of_thread;
  };
  struct Cleaner {
    Cleaner() { List::of_thread.has_cleaner = true; }
    ~Cleaner() {
      auto& list = List::of_thread;
      list.is_over = true;
      while (auto* block = list.first) {
        list.first = block->next;
        ::operator delete(block);
      }
    }
  };
  static void add_cleaner() { static thread_local const Cleaner cleaner; }
};

template <class T>
thread_local constinit typename RecycledMemory<T>::List RecycledMemory<T>::List::of_thread;

}  // namespace fsdp
