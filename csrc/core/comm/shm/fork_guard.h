// Descriptors that must not survive in forked children (data loader workers, say): a socket held open by a child would
// make its dead parent look alive.
#pragma once

namespace accelerate_cpp::comm {

// Closes `descriptor` in every child forked from now on.
void close_after_fork(int descriptor);

// Closes `descriptor` in this process, unless this process is a forked child in which that has happened already.
void close_now(int descriptor);

}  // namespace accelerate_cpp::comm
