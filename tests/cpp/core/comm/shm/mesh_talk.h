// What the tests of the mesh share: hooks to wait with, and ranks that talk over their channels.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "core/comm/options.h"
#include "core/comm/shm/channel.h"

namespace accelerate_cpp::comm::testing {

using Channels = std::vector<std::unique_ptr<Channel>>;

inline const WaitHooks kNoHooks;

inline WaitHooks probing(InterruptProbe probe) {
  WaitHooks hooks;
  hooks.probe = std::move(probe);
  return hooks;
}

// What is sent over `channel` stands for a rank.
inline void say(Channel& channel, int rank) {
  channel.release(static_cast<std::uint32_t>(rank));
  EXPECT_TRUE(channel.flush());
}

inline int hear(Channel& channel) {
  int heard = -1;
  while (heard < 0 && !channel.closed()) {
    channel.wait_readable(std::chrono::milliseconds(100000));
    channel.drain([](std::uint32_t, int) {}, [&](std::uint32_t rank) { heard = static_cast<int>(rank); });
  }
  return heard;
}

}  // namespace accelerate_cpp::comm::testing
