//! Communicators, rendezvous and launcher, over real threads, sockets and processes.

mod conformance;
mod failures;
mod launch;
mod rendezvous;
mod support;
