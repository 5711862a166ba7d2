// Base of a watch that wraps another watch: forwards progress() and hand_over().
#pragma once

namespace ferry::protocol {

/// Base of a watch that adds something to the checks of `watch`: what there is to do meanwhile, and
/// whom the wait hands over to, are that one's.
template <class W>
struct PassedOn {
  W& watch;

  bool progress()
    requires requires { watch.progress(); }
  {
    return watch.progress();
  }
  void hand_over()
    requires requires { watch.hand_over(); }
  {
    watch.hand_over();
  }
};

}  // namespace ferry::protocol
