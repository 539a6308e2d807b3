//! Writes tar archives byte by byte, so that they can be wrong in one place.

/// Header size in bytes, and the padding unit.
pub const BLOCK: usize = 512;

/// Archive under construction.
#[derive(Debug, Clone, Default)]
pub struct TarBytes(Vec<u8>);

impl TarBytes {
    /// Starts an empty archive.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a regular entry.
    #[must_use]
    pub fn file(self, name: &str, payload: &[u8]) -> Self {
        self.member(name, b'0', payload.len() as u64, payload)
    }

    /// Appends an empty entry with a kind, such as `5` for a directory or `2` for a symbolic link.
    #[must_use]
    pub fn empty(self, name: &str, kind: u8) -> Self {
        self.member(name, kind, 0, &[])
    }

    /// Appends an entry whose header announces `size` bytes, regardless of `payload`.
    #[must_use]
    pub fn member(mut self, name: &str, kind: u8, size: u64, payload: &[u8]) -> Self {
        self.0.extend(header(name.as_bytes(), kind, size));
        self.0.extend(payload);
        self.0.resize(self.0.len().next_multiple_of(BLOCK), 0);
        self
    }

    /// Appends PAX records for the next entry.
    #[must_use]
    pub fn pax(self, records: &[(&str, &str)]) -> Self {
        let payload: String = records.iter().map(|(key, value)| pax_record(key, value)).collect();
        self.member("PaxHeaders/x", b'x', payload.len() as u64, payload.as_bytes())
    }

    /// Appends a GNU long name for the next entry.
    #[must_use]
    pub fn gnu_long_name(self, name: &str) -> Self {
        let payload = [name.as_bytes(), b"\0"].concat();
        self.member("././@LongLink", b'L', payload.len() as u64, &payload)
    }

    /// Appends the end mark and returns the archive.
    #[must_use]
    pub fn finish(self) -> Vec<u8> {
        let mut bytes = self.0;
        bytes.resize(bytes.len() + 2 * BLOCK, 0);
        bytes
    }

    /// Returns the archive without an end mark.
    #[must_use]
    pub fn without_end(self) -> Vec<u8> {
        self.0
    }
}

/// Formats a record `LENGTH KEY=VALUE\n`, where the length includes itself.
fn pax_record(key: &str, value: &str) -> String {
    let body = key.len() + value.len() + 3;
    let mut length = body + 1;
    while body + length.to_string().len() != length {
        length = body + length.to_string().len();
    }
    format!("{length} {key}={value}\n")
}

/// Creates a ustar header with a correct checksum; the name is cut at 100 bytes.
fn header(name: &[u8], kind: u8, size: u64) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let name = &name[..name.len().min(100)];
    block[..name.len()].copy_from_slice(name);
    block[100..108].copy_from_slice(b"0000644\0");
    block[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
    block[136..148].copy_from_slice(b"00000000000\0");
    block[156] = kind;
    block[257..265].copy_from_slice(b"ustar\x0000");
    block[148..156].fill(b' ');
    let sum: u64 = block.iter().map(|&byte| u64::from(byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}
