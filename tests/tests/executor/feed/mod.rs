//! Tests training steps fed by the balanced loader: ranks as threads, tiny models, different samples.

mod ahead;
mod corpus;
mod cuts;
mod damaged;
mod gaps;
mod job;
mod shares;
