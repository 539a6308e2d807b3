//! dflop-balancer
