//! Message content and headers, and the buffers and parts that content is kept in.

mod payload;

pub use payload::{Buffer, Payload, PayloadShape, Slice, even_parts};
pub(crate) use payload::{Header, Key, Message, Op, ReceiveBufferPool, ranges};
