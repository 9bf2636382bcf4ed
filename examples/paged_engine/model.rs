//! The part that an engine has already: a model, its kernels, and a pool of KV pages. A toy, but its
//! pages hold real contents: what a row holds depends on every row that it was allowed to see, so a
//! wrong mask, position, page or move changes the text.

pub const VOCAB: u32 = 64;
pub const PAGE_SIZE: usize = 4;

/// One KV row.
#[derive(Clone, Copy, Default)]
pub struct Row {
    position: i64,
    key: u64,
}

/// What the kernels are launched with: flat arrays, as on a device.
#[derive(Default)]
pub struct Batch {
    pub tokens: Vec<u32>,
    pub positions: Vec<i64>,
    /// Where each row is written: `block_table[row / PAGE_SIZE] * PAGE_SIZE + row % PAGE_SIZE`.
    pub slot_mapping: Vec<i64>,
    /// Where the rows of each sequence begin in the arrays above.
    pub qo_indptr: Vec<i32>,
    /// Committed rows of each sequence.
    pub prefixes: Vec<usize>,
    /// Block table of each sequence.
    pub tables: Vec<Vec<u32>>,
    /// FlashInfer's packed masks, one sequence after another; none for a causal one.
    pub packed_mask: Vec<u8>,
    /// Where they begin, in bytes.
    pub mask_indptr: Vec<i32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Forward,
    MoveRows,
}

#[derive(Debug)]
pub struct DeviceError;

pub struct Model {
    rows: Vec<Row>,
    free: Vec<u32>,
    references: Vec<u32>,
    /// Says whether a kernel call fails.
    pub inject: Box<dyn FnMut(Call) -> bool>,
}

pub fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(b);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ (z >> 29)
}

/// The token that mostly follows another.
pub fn first_choice(token: u32) -> u32 {
    (mix(token.into(), 1) % u64::from(VOCAB)) as u32
}

/// The token that often follows it otherwise.
pub fn second_choice(token: u32) -> u32 {
    (first_choice(token) + 1 + (token % 7)) % VOCAB
}

/// Attention of one row over those that it sees, with relative positions.
pub fn attend(token: u32, position: i64, seen: impl Iterator<Item = Row>) -> Row {
    let sum = seen
        .fold(0u64, |sum, row| sum.wrapping_add(mix(row.key, (position - row.position) as u64)));
    Row { position, key: mix(mix(token.into(), sum), 2) }
}

/// The greedy pick after a row.
pub fn pick(token: u32, row: Row) -> u32 {
    match mix(row.key, 3) % 8 {
        0 => (row.key % u64::from(VOCAB)) as u32,
        1 | 2 => second_choice(token),
        _ => first_choice(token),
    }
}

impl Model {
    pub fn new(pages: usize) -> Self {
        Self {
            rows: vec![Row::default(); pages * PAGE_SIZE],
            free: (0..pages as u32).rev().collect(),
            references: vec![0; pages],
            inject: Box::new(|_| false),
        }
    }

    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    pub fn allocate(&mut self) -> Option<u32> {
        let page = self.free.pop()?;
        self.references[page as usize] = 1;
        Some(page)
    }

    pub fn share(&mut self, page: u32) {
        self.references[page as usize] += 1;
    }

    pub fn release(&mut self, page: u32) {
        let references = &mut self.references[page as usize];
        *references -= 1;
        if *references == 0 {
            self.free.push(page);
        }
    }

    /// One pass over all rows of a batch; gives the pick after each. If it fails, it fails halfway.
    pub fn forward(&mut self, batch: &Batch) -> Result<Vec<u32>, DeviceError> {
        let sequences = batch.tables.len();
        let fails_at = (self.inject)(Call::Forward).then_some(sequences / 2);
        let mut picks = Vec::with_capacity(batch.tokens.len());
        for sequence in 0..sequences {
            if fails_at == Some(sequence) {
                return Err(DeviceError);
            }
            let first = batch.qo_indptr[sequence] as usize;
            let count = batch.qo_indptr[sequence + 1] as usize - first;
            let prefix = batch.prefixes[sequence];
            let mask_start = batch.mask_indptr[sequence] as usize;
            let mask = &batch.packed_mask[mask_start..batch.mask_indptr[sequence + 1] as usize];
            for query in 0..count {
                // Reads the mask as FlashInfer's kernel does.
                let sees = |column: usize| {
                    let element = query * (prefix + count) + column;
                    if mask.is_empty() {
                        column < prefix + query
                    } else {
                        column != prefix + query && mask[element / 8] >> (element % 8) & 1 == 1
                    }
                };
                let table = &batch.tables[sequence];
                let seen = (0..prefix + count).filter(|&column| sees(column)).map(|row| {
                    self.rows[table[row / PAGE_SIZE] as usize * PAGE_SIZE + row % PAGE_SIZE]
                });
                let (token, position) =
                    (batch.tokens[first + query], batch.positions[first + query]);
                let row = attend(token, position, seen);
                self.rows[batch.slot_mapping[first + query] as usize] = row;
                picks.push(pick(token, row));
            }
        }
        Ok(picks)
    }

    /// Moves KV rows, in order and in place. If it fails, no row has moved.
    pub fn move_rows(&mut self, moves: &[(usize, usize)]) -> Result<(), DeviceError> {
        if (self.inject)(Call::MoveRows) {
            return Err(DeviceError);
        }
        for &(from, to) in moves {
            self.rows[to] = self.rows[from];
        }
        Ok(())
    }
}
