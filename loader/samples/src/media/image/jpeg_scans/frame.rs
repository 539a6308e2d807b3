//! JPEG frame, scans and tables.

use super::{Block, FORMAT};
use crate::media::DecodeError;
use crate::media::probe::JpegHeader;
use crate::media::probe::field::u16_be;

/// Number of tables per kind.
const TABLES: usize = 4;

/// Color component in a frame, with coefficients.
pub(super) struct Component {
    id: u8,
    /// Blocks per interleaved unit: columns, rows.
    pub(super) unit: (usize, usize),
    /// Blocks with image samples: columns, rows.
    own: (usize, usize),
    /// Number of blocks per row in `blocks`.
    pub(super) stride: usize,
    /// Image samples: columns, rows.
    pub(super) size: (usize, usize),
    table: usize,
    /// Quantization table at the component's first scan, in zigzag order.
    pub(super) quantization: Option<[u16; 64]>,
    pub(super) blocks: Vec<Block>,
}

impl Component {
    pub(super) fn block_mut(&mut self, column: usize, row: usize) -> &mut Block {
        &mut self.blocks[row * self.stride + column]
    }
}

/// Frame: components, and the interleaved units that cover the image.
pub(super) struct Frame {
    pub(super) components: Vec<Component>,
    /// Interleaved units: columns, rows.
    units: (usize, usize),
    pub(super) is_progressive: bool,
    pub(super) is_arithmetic: bool,
}

impl Frame {
    pub(super) fn new(header: &JpegHeader) -> Self {
        let (across_max, down_max) = header.sampling_max();
        let (width, height) = (header.width as usize, header.height as usize);
        let units = Self::units(header);
        let components = header.components().iter().zip(Self::blocks(header)).map(|(component, blocks)| {
            let (across, down) = (usize::from(component.across), usize::from(component.down));
            let samples_wide = (width * across).div_ceil(across_max.into());
            let samples_high = (height * down).div_ceil(down_max.into());
            Component {
                id: component.id,
                unit: (across, down),
                own: (samples_wide.div_ceil(8), samples_high.div_ceil(8)),
                stride: units.0 * across,
                size: (samples_wide, samples_high),
                table: component.quantization.into(),
                quantization: None,
                blocks: vec![[0; 64]; blocks],
            }
        });
        Self {
            components: components.collect(),
            units,
            is_progressive: header.is_progressive(),
            is_arithmetic: header.is_arithmetic(),
        }
    }

    /// Returns the number of interleaved units: columns, rows.
    fn units(header: &JpegHeader) -> (usize, usize) {
        let (across_max, down_max) = header.sampling_max();
        let (width, height) = (header.width as usize, header.height as usize);
        (width.div_ceil(8 * usize::from(across_max)), height.div_ceil(8 * usize::from(down_max)))
    }

    /// Returns the number of blocks held for each component.
    pub(super) fn blocks(header: &JpegHeader) -> impl Iterator<Item = usize> {
        let (across, down) = Self::units(header);
        let held = move |wide: u8, high: u8| across * usize::from(wide) * down * usize::from(high);
        header.components().iter().map(move |component| held(component.across, component.down))
    }
}

/// Scan header.
pub(super) struct Scan {
    /// Component indices within the frame.
    pub(super) members: Vec<usize>,
    /// DC and AC table numbers by scan member.
    pub(super) tables: Vec<(usize, usize)>,
    /// First and last coefficient.
    pub(super) band: (usize, usize),
    /// Position of the lowest bit that this scan adds.
    pub(super) shift: u32,
    pub(super) is_progressive: bool,
    /// Whether an earlier scan contained the higher bits.
    pub(super) is_refinement: bool,
}

impl Scan {
    /// Reads a scan header, and fixes the quantization tables for components that start in this scan.
    pub(super) fn read(
        body: &[u8],
        start: usize,
        frame: &mut Frame,
        tables: &Tables,
    ) -> Result<Self, DecodeError> {
        let malformed = |reason: &str| DecodeError::malformed(FORMAT, start, reason);
        let count = usize::from(*body.first().ok_or_else(|| malformed("the scan header is cut"))?);
        let (Some(members), Some(&[first, last, bits])) =
            (body.get(1..1 + 2 * count), body.get(1 + 2 * count..4 + 2 * count))
        else {
            return Err(malformed("the scan header is cut"));
        };
        let mut scan = Self {
            members: Vec::with_capacity(count),
            tables: Vec::with_capacity(count),
            band: if frame.is_progressive { (first.into(), last.into()) } else { (0, 63) },
            shift: if frame.is_progressive { u32::from(bits & 0xF) } else { 0 },
            is_progressive: frame.is_progressive,
            is_refinement: frame.is_progressive && bits >> 4 != 0,
        };
        for member in members.chunks_exact(2) {
            let of_id =
                |place: &usize| frame.components[*place].id == member[0] && !scan.members.contains(place);
            let place = (0..frame.components.len()).find(of_id);
            let place = place.ok_or_else(|| malformed("a scan names a component that the frame lacks"))?;
            let component = &mut frame.components[place];
            if component.quantization.is_none() {
                let table = tables.quantization[component.table];
                component.quantization =
                    Some(table.ok_or_else(|| malformed("a scan uses a quantization table that is missing"))?);
            }
            scan.members.push(place);
            scan.tables.push((usize::from(member[1] >> 4) % TABLES, usize::from(member[1] & 0xF) % TABLES));
        }
        let (first, last) = scan.band;
        let is_band =
            if first == 0 { !scan.is_progressive || last == 0 } else { first <= last && count == 1 };
        let is_split = !scan.is_refinement || u32::from(bits >> 4) == scan.shift + 1;
        if scan.members.is_empty() || !is_band || !is_split || last > 63 || scan.shift > 13 {
            return Err(malformed("the scan header contradicts itself"));
        }
        Ok(scan)
    }

    /// Returns the number of units, as columns and rows: single blocks if the scan has a single component.
    pub(super) fn units(&self, frame: &Frame) -> (usize, usize) {
        match self.members[..] {
            [only] => frame.components[only].own,
            _ => frame.units,
        }
    }
}

/// Huffman code: number of codes for each length, and the symbols in order.
#[derive(Clone)]
pub(super) struct HuffmanCode {
    pub(super) counts: [u8; 16],
    pub(super) symbols: Vec<u8>,
}

/// Conditioning for arithmetic codes: bounds for small DC differences, and for low AC coefficients.
#[derive(Clone, Copy)]
pub(super) struct Conditioning {
    pub(super) dc: (u8, u8),
    pub(super) ac: u8,
}

/// Tables in effect when a scan starts.
pub(super) struct Tables {
    quantization: [Option<[u16; 64]>; TABLES],
    /// Huffman codes: DC, AC.
    pub(super) huffman: [[Option<HuffmanCode>; TABLES]; 2],
    pub(super) conditioning: [Conditioning; TABLES],
    /// Units between restart markers; 0 without such markers.
    pub(super) restart_interval: u32,
}

impl Default for Tables {
    fn default() -> Self {
        Self {
            quantization: [None; TABLES],
            huffman: Default::default(),
            conditioning: [Conditioning { dc: (0, 1), ac: 5 }; TABLES],
            restart_interval: 0,
        }
    }
}

impl Tables {
    /// Reads quantization tables with 8 or 16 bits.
    pub(super) fn read_quantization(&mut self, mut body: &[u8], start: usize) -> Result<(), DecodeError> {
        while let Some((&kind, rest)) = body.split_first() {
            let width = if kind >> 4 == 0 { 1 } else { 2 };
            let (true, Some(values)) = (usize::from(kind & 0xF) < TABLES, rest.get(..64 * width)) else {
                return Err(DecodeError::malformed(FORMAT, start, "a quantization table is cut"));
            };
            let mut table = [0; 64];
            for (entry, value) in table.iter_mut().zip(values.chunks_exact(width)) {
                *entry = value.iter().fold(0, |number, &byte| number << 8 | u16::from(byte));
            }
            self.quantization[usize::from(kind & 0xF)] = Some(table);
            body = &rest[64 * width..];
        }
        Ok(())
    }

    /// Reads Huffman tables.
    pub(super) fn read_huffman(&mut self, mut body: &[u8], start: usize) -> Result<(), DecodeError> {
        let malformed = || DecodeError::malformed(FORMAT, start, "a Huffman table is cut or overfull");
        while let [kind, rest @ ..] = body {
            let counts: [u8; 16] =
                rest.get(..16).and_then(|counts| counts.try_into().ok()).ok_or_else(malformed)?;
            let total: usize = counts.iter().map(|&count| usize::from(count)).sum();
            let symbols = rest.get(16..16 + total).filter(|_| total <= 256).ok_or_else(malformed)?;
            // The codes for each length have to leave room for longer codes.
            let room = counts.iter().try_fold(1_u32, |room, &count| (room * 2).checked_sub(count.into()));
            let (class, table) = (usize::from(kind >> 4), usize::from(kind & 0xF));
            if room.is_none() || class > 1 || table >= TABLES {
                return Err(malformed());
            }
            self.huffman[class][table] = Some(HuffmanCode { counts, symbols: symbols.to_vec() });
            body = &rest[16 + total..];
        }
        Ok(())
    }

    /// Reads the conditioning for arithmetic codes.
    pub(super) fn read_conditioning(&mut self, body: &[u8], start: usize) -> Result<(), DecodeError> {
        for pair in body.chunks_exact(2) {
            let (class, table, value) = (pair[0] >> 4, usize::from(pair[0] & 0xF), pair[1]);
            let dc = (value & 0xF, value >> 4);
            match self.conditioning.get_mut(table) {
                Some(conditioning) if class == 0 && dc.0 <= dc.1 => conditioning.dc = dc,
                Some(conditioning) if class == 1 && (1..=63).contains(&value) => conditioning.ac = value,
                _ => {
                    let reason = "the conditioning of arithmetic codes is invalid";
                    return Err(DecodeError::malformed(FORMAT, start, reason));
                }
            }
        }
        Ok(())
    }

    /// Reads the number of units between restart markers.
    pub(super) fn read_restart_interval(&mut self, body: &[u8], start: usize) -> Result<(), DecodeError> {
        let interval = u16_be(body, 0);
        let interval =
            interval.ok_or_else(|| DecodeError::malformed(FORMAT, start, "the restart interval is cut"))?;
        self.restart_interval = interval.into();
        Ok(())
    }
}
