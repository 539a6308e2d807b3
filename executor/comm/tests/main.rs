//! Communicators, the rendezvous of ranks and their launcher, over real threads, sockets and processes.

mod conformance;
mod failures;
mod launch;
mod rendezvous;
mod support;
