// Ctrl-C while Python's main thread waits in code that never looks for signals, such as torch's futures and the end of
// DDP's backward pass. The thread that carries out the operation notices it, and fails the operation.
#pragma once

namespace accelerate_cpp::bindings {

// From now on this process counts Ctrl-C, as long as Python's own handler handles it. May be called again.
void watch_interrupts();

// For threads that Python does not know. If Ctrl-C was pressed a while ago and the main thread has been asleep since,
// throws an error that becomes KeyboardInterrupt.
void check_unanswered_interrupt();

}  // namespace accelerate_cpp::bindings
