// Hardware queues, which streams share if the setting `queues` asks for it.
//
// A device has some queues, and the streams of a device take them in turn as they are created. An operation
// starts only after all earlier operations of its queue have started, whatever their streams: an operation
// that waits holds up those behind it, as on a device with fewer connections than a program has streams.
#pragma once

#include "stream.h"

namespace cuda_stand_in {

// Appends an operation to the queue of its stream, with the lock of the schedule held.
void join_queue(const Stream& stream, Operation& operation);
// Removes an operation that will not start, with the lock of the schedule held.
void leave_queue(const Stream& stream, const Operation& operation);
// Waits until an operation may start, and starts it.
void take_turn(const Stream& stream, const Operation& operation);

}  // namespace cuda_stand_in
