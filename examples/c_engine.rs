//! An engine written in C takes trees through flat arrays: both sides of such a boundary, in one
//! program. [`boundary`] is what would be compiled into a shared library; [`engine`] is written as C
//! would be, with pointers and lengths, and calls nothing else.
//!
//! `cargo run --example c_engine`

pub fn main() {
    let prompt: Vec<u32> = (0..10).collect();
    for tree_nodes in [0, 15] {
        let run = engine::generate(&prompt, 60, tree_nodes);
        println!("{tree_nodes} nodes, {} passes: {:?}", run.passes, run.text);
    }
}

/// The library's side. A session is an opaque pointer; every function returns 0 or a negative
/// number, for which [`ddtree_error`](boundary::ddtree_error) has the words. Arrays handed out belong
/// to the session and hold until the next call with it.
///
/// What every `unsafe` here relies on is what C callers promise, as with any library: a session comes
/// from `ddtree_new`, is used by one thread at a time and not after `ddtree_free`; an array has as
/// many elements as its length says.
pub mod boundary {
    use std::{ffi::c_char, ptr, slice};

    use ddtree::{
        Algorithm, Capabilities, Config, Error, Need, Plan, Request, Session,
        layout::{bits, slots},
    };

    pub const NEEDS_NOTHING: i32 = 0;
    pub const NEEDS_PREFILL: i32 = 1;
    pub const NEEDS_PROPOSAL: i32 = 2;
    pub const NEEDS_VERIFICATION: i32 = 3;
    pub const NEEDS_COMMIT: i32 = 4;

    /// A session and the memory that its arrays lie in.
    pub struct DdtreeSession {
        session: Session,
        positions: Vec<i32>,
        mask: Vec<u32>,
        error: String,
    }

    /// What to forward. For a prefill, `parents` and `mask` are null.
    #[repr(C)]
    pub struct DdtreeBatch {
        /// Number of rows.
        pub n: usize,
        /// Cache row of the first one: the number of rows committed.
        pub start: usize,
        /// `[n]`.
        pub tokens: *const u32,
        /// `[n]`: start + depth.
        pub positions: *const i32,
        /// `[n]`, -1 for the root.
        pub parents: *const i32,
        /// `[n, mask_words]`: bit j % 32 of word j / 32 of row i is 1 if row i sees row j. Null if each
        /// row sees all before it. Committed rows are visible to all.
        pub mask: *const u32,
        pub mask_words: usize,
    }

    impl Default for DdtreeBatch {
        /// No rows; for `ddtree_batch` to fill in.
        fn default() -> Self {
            Self {
                n: 0,
                start: 0,
                tokens: ptr::null(),
                positions: ptr::null(),
                parents: ptr::null(),
                mask: ptr::null(),
                mask_words: 0,
            }
        }
    }

    /// Rows to keep after a verification: row `start + i` becomes what row `start + slots[i]` is, for
    /// i ascending, in place.
    #[repr(C)]
    pub struct DdtreeCommit {
        pub n: usize,
        pub start: usize,
        pub slots: *const u32,
    }

    /// Null if the settings make no sense. `nodes` 0 decodes without a draft.
    #[unsafe(no_mangle)]
    pub extern "C" fn ddtree_new(
        vocab_size: usize,
        max_len: usize,
        horizon: usize,
        nodes: usize,
    ) -> *mut DdtreeSession {
        let algorithm = if nodes == 0 { Algorithm::Autoregressive } else { Algorithm::Tree };
        let config = Config::new(algorithm).budget(nodes);
        match Plan::resolve(&config, &Capabilities::new(vocab_size, max_len), horizon) {
            Ok(plan) => Box::into_raw(Box::new(DdtreeSession {
                session: Session::new(plan),
                positions: Vec::new(),
                mask: Vec::new(),
                error: String::new(),
            })),
            Err(_) => ptr::null_mut(),
        }
    }

    /// # Safety
    /// As the module says; null is allowed.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn ddtree_free(session: *mut DdtreeSession) {
        if !session.is_null() {
            // SAFETY: made by `Box::into_raw` in `ddtree_new`, and not used again.
            drop(unsafe { Box::from_raw(session) });
        }
    }

    /// The last error of a session as `len` bytes of UTF-8.
    ///
    /// # Safety
    /// As the module says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn ddtree_error(
        session: *const DdtreeSession,
        len: *mut usize,
    ) -> *const c_char {
        // SAFETY: a live session and a pointer to one length.
        let session = unsafe { &*session };
        unsafe { *len = session.error.len() };
        session.error.as_ptr().cast()
    }

    /// # Safety
    /// As the module says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn ddtree_start(
        session: *mut DdtreeSession,
        prompt: *const u32,
        prompt_len: usize,
        max_new_tokens: usize,
    ) -> i32 {
        // SAFETY: `prompt_len` tokens.
        let prompt = unsafe { array(prompt, prompt_len) };
        let request = Request::new(prompt).max_new_tokens(max_new_tokens);
        unsafe { call(session, |s| s.session.start(&request)) }
    }

    /// # Safety
    /// As the module says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn ddtree_needs(session: *const DdtreeSession) -> i32 {
        // SAFETY: a live session.
        match unsafe { &*session }.session.need() {
            Need::Prefill => NEEDS_PREFILL,
            Need::Proposal => NEEDS_PROPOSAL,
            Need::Verification => NEEDS_VERIFICATION,
            Need::Commit => NEEDS_COMMIT,
            _ => NEEDS_NOTHING,
        }
    }

    /// Hands over a draft: `depths` lists of `k` tokens and natural log-probabilities, best first. The
    /// root is the last token emitted.
    ///
    /// # Safety
    /// As the module says; both arrays are `[depths, k]`.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn ddtree_propose(
        session: *mut DdtreeSession,
        tokens: *const u32,
        log_probs: *const f32,
        depths: usize,
        k: usize,
    ) -> i32 {
        let len = depths.saturating_mul(k);
        // SAFETY: both have `depths * k` elements.
        let (tokens, log_probs) = unsafe { (array(tokens, len), array(log_probs, len)) };
        let propose = |s: &mut DdtreeSession| {
            let (request, proposal) = s.session.proposal()?;
            let lists = tokens.chunks(k.max(1)).zip(log_probs.chunks(k.max(1)));
            for (tokens, log_probs) in lists.take(request.horizon()) {
                proposal.push(tokens, log_probs)?;
            }
            s.session.proposed()
        };
        unsafe { call(session, propose) }
    }

    /// What to forward, for a prefill or a verification.
    ///
    /// # Safety
    /// As the module says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn ddtree_batch(
        session: *mut DdtreeSession,
        batch: *mut DdtreeBatch,
    ) -> i32 {
        let fill = |s: &mut DdtreeSession| {
            s.mask.clear();
            s.positions.clear();
            let (start, tokens, parents): (_, _, &[i32]) = if s.session.need() == Need::Prefill {
                let (prefill, _) = s.session.prefill()?;
                s.positions.extend((prefill.start() as i32..).take(prefill.tokens().len()));
                (prefill.start(), prefill.tokens(), &[])
            } else {
                let (round, _) = s.session.verification()?;
                let tree = round.tree();
                s.positions.resize(tree.len(), 0);
                slots::write_positions(tree, round.start(), &mut s.positions)?;
                if let Some(mask) = round.mask() {
                    s.mask.resize(tree.len() * bits::words_per_row::<u32>(tree.len()), 0);
                    bits::write_rows(mask, &mut s.mask)?;
                }
                (round.start(), tree.tokens(), tree.parents())
            };
            let pointer = |empty: bool, pointer| if empty { ptr::null() } else { pointer };
            let filled = DdtreeBatch {
                n: tokens.len(),
                start,
                tokens: tokens.as_ptr(),
                positions: s.positions.as_ptr(),
                parents: if parents.is_empty() { ptr::null() } else { parents.as_ptr() },
                mask: pointer(s.mask.is_empty(), s.mask.as_ptr()),
                mask_words: s.mask.len() / tokens.len(),
            };
            // SAFETY: room for one batch.
            unsafe { batch.write(filled) };
            Ok(())
        };
        unsafe { call(session, fill) }
    }

    /// Takes one pick per row of a verification, or the pick after the last row of a prefill.
    ///
    /// # Safety
    /// As the module says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn ddtree_picked(
        session: *mut DdtreeSession,
        picks: *const u32,
        n: usize,
    ) -> i32 {
        // SAFETY: `n` picks.
        let picked = unsafe { array(picks, n) };
        let take = |s: &mut DdtreeSession| {
            if s.session.need() == Need::Prefill {
                s.session.prefill()?.1.extend(picked);
                return s.session.prefilled();
            }
            s.session.verification()?.1.extend(picked);
            s.session.verified()
        };
        unsafe { call(session, take) }
    }

    /// Which rows to keep. The engine moves them and calls `ddtree_committed`, or fails and calls
    /// `ddtree_abandon`.
    ///
    /// # Safety
    /// As the module says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn ddtree_commit(
        session: *mut DdtreeSession,
        commit: *mut DdtreeCommit,
    ) -> i32 {
        let fill = |s: &mut DdtreeSession| {
            let plan = s.session.commit()?;
            let (n, start, slots) = (plan.path().len(), plan.start(), plan.path().as_ptr());
            // SAFETY: room for one commit.
            unsafe { commit.write(DdtreeCommit { n, start, slots }) };
            Ok(())
        };
        unsafe { call(session, fill) }
    }

    /// # Safety
    /// As the module says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn ddtree_committed(session: *mut DdtreeSession) -> i32 {
        unsafe { call(session, |s| s.session.committed()) }
    }

    /// Back to the last committed token.
    ///
    /// # Safety
    /// As the module says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn ddtree_abandon(session: *mut DdtreeSession) -> i32 {
        let abandon = |s: &mut DdtreeSession| {
            s.session.abandon();
            Ok(())
        };
        unsafe { call(session, abandon) }
    }

    /// Tokens emitted by the last `ddtree_picked` (prefill) or `ddtree_committed`.
    ///
    /// # Safety
    /// As the module says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn ddtree_new_tokens(
        session: *const DdtreeSession,
        len: *mut usize,
    ) -> *const u32 {
        // SAFETY: a live session and a pointer to one length.
        let tokens = unsafe { &*session }.session.new_tokens();
        unsafe { *len = tokens.len() };
        tokens.as_ptr()
    }

    /// # Safety
    /// `session` is live and used by nobody else during the call.
    unsafe fn call(
        session: *mut DdtreeSession,
        run: impl FnOnce(&mut DdtreeSession) -> Result<(), Error>,
    ) -> i32 {
        // SAFETY: as above.
        let session = unsafe { &mut *session };
        match run(session) {
            Ok(()) => 0,
            Err(error) => {
                // What is wrong with a row of logits is in the error's source.
                session.error = error.to_string();
                let mut source = std::error::Error::source(&error);
                while let Some(cause) = source {
                    session.error = format!("{}: {cause}", session.error);
                    source = cause.source();
                }
                -1
            }
        }
    }

    /// # Safety
    /// `pointer` has `len` elements that live as long as the call, or `len` is 0.
    unsafe fn array<'a, T>(pointer: *const T, len: usize) -> &'a [T] {
        if len == 0 {
            return &[];
        }
        // SAFETY: as above.
        unsafe { slice::from_raw_parts(pointer, len) }
    }
}

/// The engine's side. Its model is a toy: what a row holds depends on all rows that it sees.
pub mod engine {
    use std::{ptr, slice};

    use super::boundary::*;

    const VOCAB: u32 = 50;
    const MAX_LEN: usize = 256;
    const HORIZON: usize = 5;

    pub struct Run {
        pub text: Vec<u32>,
        pub passes: usize,
    }

    /// A cache row: position and contents.
    type Row = (i32, u64);

    fn mix(a: u64, b: u64) -> u64 {
        let z = a.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(b);
        (z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (z >> 32)
    }

    /// Mostly what the drafter guesses.
    fn pick(token: u32, contents: u64) -> u32 {
        match contents % 5 {
            0 => (mix(contents, 3) % u64::from(VOCAB)) as u32,
            1 => guess(token).1,
            _ => guess(token).0,
        }
    }

    fn guess(token: u32) -> (u32, u32) {
        ((token * 7 + 3) % VOCAB, (token * 7 + 4) % VOCAB)
    }

    /// One pass over the rows of a batch: writes them to the cache, and the pick after each.
    fn forward(cache: &mut [Row], batch: &DdtreeBatch, picks: &mut [u32]) {
        // SAFETY: a batch that the library filled has `n` tokens and positions, and a mask of `n`
        // rows unless it is null.
        let (tokens, positions, mask) = unsafe {
            let mask_len = if batch.mask.is_null() { 0 } else { batch.n * batch.mask_words };
            (
                slice::from_raw_parts(batch.tokens, batch.n),
                slice::from_raw_parts(batch.positions, batch.n),
                (mask_len > 0).then(|| slice::from_raw_parts(batch.mask, mask_len)),
            )
        };
        for i in 0..batch.n {
            let sees = |row: usize| match (row.checked_sub(batch.start), mask) {
                (None, _) => true,
                (Some(j), None) => j < i,
                (Some(j), Some(mask)) => {
                    j != i && mask[i * batch.mask_words + j / 32] >> (j % 32) & 1 == 1
                }
            };
            let mut sum = 0u64;
            for (row, &(position, contents)) in cache.iter().enumerate().take(batch.start + i) {
                if sees(row) {
                    sum = sum.wrapping_add(mix(contents, (positions[i] - position) as u64));
                }
            }
            let contents = mix(u64::from(tokens[i]), sum);
            cache[batch.start + i] = (positions[i], contents);
            picks[i] = pick(tokens[i], contents);
        }
    }

    pub fn generate(prompt: &[u32], max_new_tokens: usize, nodes: usize) -> Run {
        let mut cache = vec![(0, 0); MAX_LEN];
        let mut run = Run { text: Vec::new(), passes: 0 };
        let mut picks = [0; MAX_LEN];
        // SAFETY: the session is live until it is freed at the end, and all arrays have the lengths
        // that are handed over with them.
        unsafe {
            let session = ddtree_new(VOCAB as usize, MAX_LEN, HORIZON, nodes);
            let check = |status: i32| {
                if status != 0 {
                    let mut len = 0;
                    let text = ddtree_error(session, &mut len);
                    let text = String::from_utf8_lossy(slice::from_raw_parts(text.cast(), len));
                    panic!("{text}");
                }
            };
            check(ddtree_start(session, prompt.as_ptr(), prompt.len(), max_new_tokens));
            loop {
                match ddtree_needs(session) {
                    NEEDS_PREFILL | NEEDS_VERIFICATION => {
                        let is_prefill = ddtree_needs(session) == NEEDS_PREFILL;
                        let mut batch = DdtreeBatch::default();
                        check(ddtree_batch(session, &mut batch));
                        forward(&mut cache, &batch, &mut picks);
                        run.passes += 1;
                        if is_prefill {
                            check(ddtree_picked(session, &picks[batch.n - 1], 1));
                            take_new(session, &mut run.text);
                        } else {
                            check(ddtree_picked(session, picks.as_ptr(), batch.n));
                        }
                    }
                    NEEDS_PROPOSAL => {
                        let mut tokens = [0; 2 * HORIZON];
                        let log_probs = [[0.6f32.ln(), 0.2f32.ln()]; HORIZON];
                        let mut last = run.text[run.text.len() - 1];
                        for pair in tokens.chunks_mut(2) {
                            (pair[0], pair[1]) = guess(last);
                            last = pair[0];
                        }
                        let log_probs = log_probs.as_ptr().cast();
                        check(ddtree_propose(session, tokens.as_ptr(), log_probs, HORIZON, 2));
                    }
                    NEEDS_COMMIT => {
                        let mut commit = DdtreeCommit { n: 0, start: 0, slots: ptr::null() };
                        check(ddtree_commit(session, &mut commit));
                        let slots = slice::from_raw_parts(commit.slots, commit.n);
                        for (i, &slot) in slots.iter().enumerate() {
                            cache[commit.start + i] = cache[commit.start + slot as usize];
                        }
                        check(ddtree_committed(session));
                        take_new(session, &mut run.text);
                    }
                    _ => break,
                }
            }
            ddtree_free(session);
        }
        run
    }

    /// # Safety
    /// `session` is live.
    unsafe fn take_new(session: *const DdtreeSession, text: &mut Vec<u32>) {
        let mut len = 0;
        // SAFETY: the tokens hold until the next call.
        let tokens = unsafe { slice::from_raw_parts(ddtree_new_tokens(session, &mut len), len) };
        text.extend_from_slice(tokens);
    }
}
