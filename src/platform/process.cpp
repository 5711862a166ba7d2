#include "platform/process.hpp"

#include <utility>

namespace ferry {

ProcessWatch::~ProcessWatch() {
  if (death_watch_) death_watch_->remove(handle_.get());
}

ProcessWatch::ProcessWatch(ProcessWatch&& other) noexcept
    : process_(other.process_),
      handle_(std::move(other.handle_)),
      death_watch_(std::move(other.death_watch_)),
      fixed_(other.fixed_.load()) {}

}  // namespace ferry
