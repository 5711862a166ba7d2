// Options whose fields may have been given by their old names.
#pragma once
#include "ferry/latency.hpp"

namespace ferry {

template <class Options>
Options with_new_names(Options options) {
  if constexpr (requires { options.sms; }) options.sms.pass_on(options.num_sms);
  if constexpr (requires { options.worst_case_rows; }) {
    options.worst_case_rows.pass_on(options.max_recv_rows);
  }
  if constexpr (requires { options.waits; }) options.waits.pass_on(options.wait_ns);
  return options;
}

}  // namespace ferry
