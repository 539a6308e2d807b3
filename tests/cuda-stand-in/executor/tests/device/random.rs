//! Random numbers by a seed.

/// Generator: splitmix64.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number in `from..until`.
    pub(crate) fn below(&mut self, from: usize, until: usize) -> usize {
        from + (self.bits() % (until - from) as u64) as usize
    }

    /// Returns a number between -1.5 and 1.5.
    pub(crate) fn number(&mut self) -> f32 {
        ((self.bits() >> 40) as f32 / (1 << 24) as f32 - 0.5) * 3.0
    }

    pub(crate) fn numbers(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.number()).collect()
    }
}

/// Returns the run seed: `DFLOP_SEED`, or the time.
pub(crate) fn seed() -> u64 {
    let from_time =
        || std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(1, |elapsed| elapsed.as_nanos() as u64);
    std::env::var("DFLOP_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(from_time)
}
