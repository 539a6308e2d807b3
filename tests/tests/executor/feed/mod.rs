//! Training steps fed by the balanced loader: ranks as threads, tiny models, samples that vary.

mod corpus;
mod cuts;
mod damaged;
mod gaps;
mod job;
mod shares;
