//! Message content and headers, and the buffers and parts that content is kept in.

mod header;
mod parts;
mod payload;
mod receive_buffers;
mod slice;

pub(crate) use header::{Header, Key, Message, Op};
pub use parts::even_parts;
pub(crate) use parts::ranges;
pub use payload::{Buffer, Payload, PayloadShape};
pub(crate) use receive_buffers::ReceiveBufferPool;
pub use slice::Slice;
