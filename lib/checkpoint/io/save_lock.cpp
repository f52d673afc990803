#include "checkpoint/io/save_lock.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "checkpoint/checkpoint_error.hpp"
#include "checkpoint/io/checkpoint_names.hpp"

namespace fsdp {

std::unique_ptr<SaveLock> SaveLock::take(const std::string& parent, const std::string& name) {
  const auto path = parent + "/" + hidden_name(name, "lock");
  for (;;) {
    const int lock = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    require_checkpoint(lock >= 0, "{}: cannot be made: {}", path, std::strerror(errno));
    if (::flock(lock, LOCK_EX | LOCK_NB) != 0) {
      const int reason = errno;
      ::close(lock);
      require_checkpoint(reason == EWOULDBLOCK || reason == EINTR, "{}: cannot be locked: {}", path, std::strerror(reason));
      return nullptr;
    }
    // Whoever had it before may have removed the file since it was opened here.
    struct stat held {}, named {};
    if (::fstat(lock, &held) == 0 && ::stat(path.c_str(), &named) == 0 && held.st_ino == named.st_ino)
      return std::unique_ptr<SaveLock>(new SaveLock(path, lock));
    ::close(lock);
  }
}

SaveLock::~SaveLock() {
  ::unlink(path_.c_str());
  ::close(descriptor_);
}

}  // namespace fsdp
