//! Message content and headers, and the buffers and parts that content is kept in.

mod header;
mod payload;
mod slice;

pub(crate) use header::{Header, Key, Message, Op};
pub(crate) use payload::ReceiveBufferPool;
pub use payload::{Buffer, Payload, PayloadShape};
pub(crate) use slice::ranges;
pub use slice::{Slice, even_parts};
