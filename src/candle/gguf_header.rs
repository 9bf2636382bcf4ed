//! What candle's reader of GGUF headers takes for granted.

use std::io::{ErrorKind, Read, Result, Seek, SeekFrom};

/// The key whose value candle divides by.
const ALIGNMENT: &[u8] = b"general.alignment";

/// Arrays of arrays are read down to this depth; candle refuses them earlier.
const DEPTH: usize = 65;

/// Whether the tensors of a file are aligned to multiples of 0, on which candle panics. Any other damage
/// is left for candle to report. `reader` starts and ends at the beginning.
///
/// # Errors
/// A reader that fails to seek.
pub(super) fn is_aligned_to_zero(reader: &mut (impl Read + Seek)) -> Result<bool> {
    let aligned_to_zero = Header { reader, wide: true }.aligned_to_zero();
    reader.seek(SeekFrom::Start(0))?;
    Ok(aligned_to_zero.unwrap_or(false))
}

struct Header<'a, R> {
    reader: &'a mut R,
    /// Whether counts and lengths are of 64 bits, as in every version but the first.
    wide: bool,
}

impl<R: Read + Seek> Header<'_, R> {
    fn aligned_to_zero(&mut self) -> Result<bool> {
        let (_magic, version) = (self.u32()?, self.u32()?);
        self.wide = version != 1;
        let _tensors = self.length()?;
        for _ in 0..self.length()? {
            let len = self.length()?;
            let is_alignment = self.is_alignment(len)?;
            let kind = self.u32()?;
            match (is_alignment, kind) {
                (true, 0 | 1) if self.bytes::<1>()? == [0] => return Ok(true),
                (true, 2 | 3) if self.bytes::<2>()? == [0; 2] => return Ok(true),
                (true, 4 | 5) if self.bytes::<4>()? == [0; 4] => return Ok(true),
                (true, 0..=5) => {}
                _ => self.skip_value(kind, DEPTH)?,
            }
        }
        Ok(false)
    }

    /// Whether a key of `len` bytes is the alignment's, as candle takes it: without zeroes at the end.
    fn is_alignment(&mut self, len: u64) -> Result<bool> {
        let Some(mut rest) = len.checked_sub(ALIGNMENT.len() as u64) else {
            self.skip(len)?;
            return Ok(false);
        };
        let mut same = self.bytes::<{ ALIGNMENT.len() }>()? == ALIGNMENT;
        while same && rest > 0 {
            same = self.bytes::<1>()? == [0];
            rest -= 1;
        }
        self.skip(rest)?;
        Ok(same)
    }

    fn skip_value(&mut self, kind: u32, depth: usize) -> Result<()> {
        match kind {
            8 => {
                let len = self.length()?;
                self.skip(len)
            }
            9 if depth > 0 => {
                let (kind, len) = (self.u32()?, self.length()?);
                if let Some(size) = size_of(kind) {
                    return self.skip(len.saturating_mul(size));
                }
                (0..len).try_for_each(|_| self.skip_value(kind, depth - 1))
            }
            _ => self.skip(size_of(kind).ok_or(ErrorKind::InvalidData)?),
        }
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.reader.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn length(&mut self) -> Result<u64> {
        if self.wide { self.bytes().map(u64::from_le_bytes) } else { self.u32().map(u64::from) }
    }

    fn skip(&mut self, count: u64) -> Result<()> {
        let count = i64::try_from(count).map_err(|_| ErrorKind::InvalidData)?;
        self.reader.seek_relative(count)
    }
}

/// Bytes of a value of a kind that has always as many.
fn size_of(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}
