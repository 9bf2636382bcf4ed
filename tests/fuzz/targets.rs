//! What is fuzzed: each target takes any bytes and must not panic. Where something can be said about
//! the result, it is asserted.

use ddtree::{
    Acceptance, Algorithm, AncestorMask, BestFirst, Capabilities, CommitPlan, Config, DraftTree,
    Expand, MaskForm, Need, Plan, Proposal, Request, Session, TreeSettings,
    layout::{
        batch::{self, Extent},
        bits, dense,
        kv::{self, RowMap},
        links, slots,
    },
    tree::{SharedBudget, chain},
    walk,
};

/// A target by the name of its corpus folder.
pub type Target = fn(&[u8]);

/// All targets that need no feature.
pub const CORE: [(&str, Target); 4] =
    [("builder", builder), ("layouts", layouts), ("round", round), ("session", session)];

/// Reads values from bytes; zeros when they are used up.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn u8(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    fn below(&mut self, limit: usize) -> usize {
        (usize::from(self.u8()) | usize::from(self.u8()) << 8) % limit.max(1)
    }

    /// Often an ordinary log-probability, at times anything.
    fn log_prob(&mut self) -> f32 {
        match self.u8() {
            255 => f32::from_bits(u32::from_le_bytes([self.u8(), self.u8(), self.u8(), self.u8()])),
            254 => f32::NEG_INFINITY,
            byte => -f32::from(byte) / 16.0,
        }
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Children as the bytes say, in any order and with any score.
struct Anything<'b, 'a>(&'b mut Bytes<'a>);

impl Expand for Anything<'_, '_> {
    fn child(&mut self, _: &DraftTree, _: usize, _: usize) -> Option<(u32, f32)> {
        (!self.0.is_empty()).then(|| (u32::from(self.0.u8() % 16), self.0.log_prob()))
    }
}

fn proposal(bytes: &mut Bytes<'_>) -> Proposal {
    let mut proposal = Proposal::new();
    for _ in 0..bytes.below(9) {
        let count = bytes.below(7);
        let tokens: Vec<u32> = (0..count).map(|_| u32::from(bytes.u8() % 20)).collect();
        let mut log_probs: Vec<f32> = (0..count).map(|_| bytes.log_prob()).collect();
        if bytes.u8() > 30 {
            log_probs.sort_by(|a, b| b.total_cmp(a));
        }
        let before = proposal.clone();
        if proposal.push(&tokens, &log_probs).is_err() {
            assert_eq!(proposal, before, "a refused depth changed the proposal");
        }
    }
    proposal
}

fn settings(bytes: &mut Bytes<'_>) -> TreeSettings {
    TreeSettings {
        budget: bytes.below(80),
        top_k: if bytes.u8() < 128 { usize::MAX } else { bytes.below(6) },
        log_prob_cutoff: if bytes.u8() < 128 { f64::NEG_INFINITY } else { bytes.log_prob().into() },
        spine: bytes.u8() < 80,
    }
}

/// What holds for every tree.
fn check_tree(tree: &DraftTree) {
    let read = DraftTree::from_parents(tree.tokens(), tree.parents()).expect("a tree");
    assert_eq!(read.first_children(), tree.first_children());
    assert_eq!(read.next_siblings(), tree.next_siblings());
    assert_eq!((read.depths(), read.is_chain()), (tree.depths(), tree.is_chain()));
}

/// Builders over valid and invalid lists and scores.
pub fn builder(data: &[u8]) {
    let mut bytes = Bytes(data);
    let (settings, lists) = (settings(&mut bytes), proposal(&mut bytes));
    let mut builder = BestFirst::new();
    let mut tree = DraftTree::new(bytes.u8().into());
    builder.build(&lists, settings, &mut tree).expect("lists of a proposal are valid");
    check_tree(&tree);
    assert!(tree.nodes() <= settings.budget);
    if !settings.spine {
        // A proposal lets a log-probability exceed 0 by rounding.
        assert!(tree.scores()[1..].is_sorted_by(|a, b| a + 1e-3 >= *b), "{:?}", tree.scores());
    }
    for slot in 0..tree.len() {
        assert!(tree.children(slot).count() <= settings.top_k);
    }
    // The general builder comes to the same.
    let mut general = DraftTree::new(tree.tokens()[0]);
    builder.build_with(&mut &lists, settings, &mut general).expect("the same lists");
    assert_eq!(general, tree);
    // Fewer nodes are the first ones.
    let nodes = bytes.below(tree.len());
    let mut smaller = DraftTree::new(tree.tokens()[0]);
    let budget = settings.budget.min(nodes);
    builder.build(&lists, TreeSettings { budget, ..settings }, &mut smaller).expect("valid");
    let mut kept = tree.clone();
    kept.truncate(budget);
    if !settings.spine {
        assert_eq!(kept, smaller);
    }
    check_tree(&kept);
    chain::build(&lists, bytes.below(12), &mut tree);
    check_tree(&tree);
    assert!(tree.is_chain());
    let trees = [tree, kept, smaller, general];
    let total: usize = trees.iter().map(DraftTree::nodes).sum();
    let budget = bytes.below(2 * total + 1);
    let split: usize = SharedBudget::new().split(budget, &trees, |tree| Some(tree)).iter().sum();
    assert_eq!(split, budget.min(total));

    let mut tree = DraftTree::new(0);
    // Whatever is wrong with the scores, what has grown is a tree.
    let _ = builder.build_with(&mut Anything(&mut bytes), settings, &mut tree);
    check_tree(&tree);
}

/// A tree of any shape, or why the bytes are none.
fn tree(bytes: &mut Bytes<'_>) -> Option<DraftTree> {
    let slots = bytes.below(72);
    let tokens: Vec<u32> = (0..slots).map(|_| u32::from(bytes.u8())).collect();
    let wild = bytes.u8() > 250;
    let parents: Vec<i32> = (0..slots)
        .map(|slot| match slot {
            _ if wild => i32::from(bytes.u8().cast_signed()),
            0 => -1,
            _ => bytes.below(slot) as i32,
        })
        .collect();
    let tree = DraftTree::from_parents(&tokens, &parents).ok()?;
    check_tree(&tree);
    Some(tree)
}

/// Writers into buffers of any size: they refuse, or write what can be read back.
pub fn layouts(data: &[u8]) {
    let mut bytes = Bytes(data);
    let Some(tree) = tree(&mut bytes) else { return };
    let (n, prefix) = (tree.len(), bytes.below(40));
    let mut mask = AncestorMask::new();
    let width = n + bytes.below(4);
    mask.build_padded(&tree, width).expect("wide enough");
    let sees = |query: usize, key: usize| {
        if query < n {
            tree.ancestors(query).any(|slot| slot == key)
        } else {
            key == 0 || key == query
        }
    };

    let mut packed = vec![0xaa; bytes.below(2 * bits::packed_len(width, prefix) + 2)];
    if bits::write_packed(&mask, prefix, &mut packed).is_ok() {
        for query in 0..width {
            for key in 0..width {
                let element = query * (prefix + width) + prefix + key;
                assert_eq!(packed[element / 8] >> (element % 8) & 1 == 1, sees(query, key));
            }
        }
    } else {
        assert!(packed.iter().all(|&byte| byte == 0xaa), "refused and written");
    }
    let mut rows = vec![7u16; bytes.below(2 * width * width.div_ceil(16) + 2)];
    if bits::write_rows(&mask, &mut rows).is_ok() {
        for query in 0..width {
            for key in 0..width {
                let word = rows[query * width.div_ceil(16) + key / 16];
                assert_eq!(word >> (key % 16) & 1 == 1, sees(query, key));
            }
        }
    }
    let shape = dense::Shape { prefix, row_stride: bytes.below(2 * (prefix + width) + 2) };
    let mut boolean = vec![false; bytes.below(2 * shape.needed(width) + 2)];
    if dense::write_boolean(&mask, shape, &mut boolean).is_ok() {
        for query in 0..width {
            for key in 0..width {
                assert_eq!(boolean[query * shape.row_stride + prefix + key], sees(query, key));
            }
        }
    }

    let mut links_to = (vec![0i64; bytes.below(2 * n)], vec![0i64; bytes.below(2 * n)]);
    if links::write(&tree, &mut links_to.0, &mut links_to.1).is_ok() {
        assert!(links_to.0.len() >= n && links_to.0.len() == links_to.1.len());
    }
    let mut counts = vec![0; bytes.below(2 * n)];
    let mut ids = vec![0; bytes.below(2 * links::sequence_ids(&tree))];
    let first = i32::MAX - bytes.below(100) as i32;
    if links::write_sequences(&tree, first, &mut counts, &mut ids).is_ok() {
        assert_eq!(counts[0] as usize, links::leaves(&tree));
    }
    let mut out = vec![0u32; bytes.below(2 * n)];
    let fits = out.len() >= n;
    assert_eq!(slots::write_tokens(&tree, &mut out).is_ok(), fits);
    assert_eq!(slots::write_positions(&tree, prefix, &mut out).is_ok(), fits);
    assert_eq!(slots::write_depths(&tree, &mut out).is_ok(), fits);
    assert!(slots::write_parents(&tree, &mut out).is_err());

    let extents: Vec<Extent> = (0..bytes.below(5))
        .map(|_| Extent { prefix: bytes.below(100), slots: bytes.below(20) })
        .collect();
    let mut offsets = vec![0u64; bytes.below(8)];
    let page_size = bytes.below(5);
    let fits = offsets.len() > extents.len();
    assert_eq!(batch::slot_offsets(&extents, &mut offsets).is_ok(), fits);
    assert_eq!(batch::packed_offsets(&extents, &mut offsets).is_ok(), fits);
    let paged = batch::page_offsets(&extents, page_size, &mut offsets);
    assert_eq!(paged.is_ok(), fits && page_size > 0);
    let _ = batch::last_page_lens(&extents, page_size, &mut offsets);
}

/// A walk along any picks, its plan, and the moves that follow from it.
pub fn round(data: &[u8]) {
    let mut bytes = Bytes(data);
    let Some(tree) = tree(&mut bytes) else { return };
    let count = if bytes.u8() > 20 { tree.len() } else { bytes.below(100) };
    let picks: Vec<u32> = (0..count)
        .map(|slot| {
            // Mostly a child's token, if there is a child.
            let children: Vec<usize> = tree.children(slot).collect();
            let choice = bytes.below(children.len() + 1);
            children.get(choice).map_or(bytes.u8().into(), |&child| tree.tokens()[child])
        })
        .collect();
    let mut outcome = Acceptance::new();
    let walked = walk(&tree, &picks, &mut outcome);
    assert_eq!(walked.is_ok(), count == tree.len());
    if walked.is_err() {
        return;
    }
    outcome.truncate(bytes.below(100));
    assert_eq!(outcome.path().len(), outcome.tokens().len());
    for (step, &slot) in outcome.path().iter().enumerate() {
        assert_eq!(tree.depths()[slot as usize] as usize, step);
        assert_eq!(picks[slot as usize], outcome.tokens()[step]);
    }
    let start = bytes.below(50);
    let mut plan = CommitPlan::new();
    plan.set(start, &outcome);
    let (page_size, pages) = (bytes.below(6), bytes.below(60));
    // Every other page, backwards.
    let table: Vec<u32> = (0..pages as u32).rev().map(|page| 2 * page).collect();
    if let Ok(map) = kv::Pages::new(&table, page_size) {
        check_moves(&map, &tree, &plan, 2 * pages * page_size);
    }
    let (capacity, window) = (bytes.below(100), bytes.below(100));
    if let Ok(map) = kv::Ring::new(capacity, window) {
        check_moves(&map, &tree, &plan, capacity);
    }
}

fn check_moves(map: &impl RowMap, tree: &DraftTree, plan: &CommitPlan, places: usize) {
    let mut written = vec![0; tree.len()];
    if kv::write_places(map, plan.start(), tree.len(), &mut written).is_err() {
        return;
    }
    let mut storage = vec![usize::MAX; places];
    written.iter().enumerate().for_each(|(slot, &place)| storage[place as usize] = slot);
    let mut moves = vec![(0, 0); plan.path().len()];
    let count = kv::write_moves(plan, map, &mut moves).expect("rows that were written");
    moves[..count].iter().for_each(|&(from, to)| storage[to] = storage[from]);
    for (step, &slot) in plan.path().iter().enumerate() {
        let place = map.place(plan.start() + step).expect("a row that was written");
        assert_eq!(storage[place], slot as usize);
    }
}

/// Any calls in any order: those out of turn are refused, and nothing is emitted twice.
pub fn session(data: &[u8]) {
    let mut bytes = Bytes(data);
    let mut capabilities = Capabilities::new(1 + bytes.below(30), 1 + bytes.below(60));
    capabilities.max_slots = 1 + bytes.below(40);
    if bytes.u8() < 60 {
        capabilities.mask = MaskForm::Links;
    }
    let algorithm = Algorithm::ALL[bytes.below(3)];
    let mut config = Config::new(algorithm).budget(bytes.below(30)).spine(bytes.u8() < 60);
    config = config.expand_below_stop(bytes.u8() < 128).trace(bytes.u8() < 40);
    if bytes.u8() < 60 {
        config = config.block_size(bytes.below(10));
    }
    let Ok(plan) = Plan::resolve(&config, &capabilities, bytes.below(9)) else { return };
    let vocab_size = plan.capabilities().vocab_size;
    let mut session = Session::new(plan);
    while !bytes.is_empty() {
        let before = session.tokens().to_vec();
        let call = bytes.below(14);
        // Mostly the call that is needed.
        let call = match session.need() {
            _ if call < 4 => call,
            Need::Nothing => 4,
            Need::Prefill => 5,
            Need::Proposal => 6,
            Need::Verification => 7,
            Need::Commit => 8,
            _ => return,
        };
        let mut token = || (bytes.below(vocab_size + usize::from(bytes.0.len() % 16 == 0))) as u32;
        let done = match call {
            0 => session.append(&[token()]).is_ok(),
            1 => session.skip_proposal().is_ok(),
            2 => {
                session.abandon();
                false
            }
            3 => {
                session.truncate_outcome(token() as usize).is_ok()
                    || session.truncate_tree(token() as usize).is_ok()
            }
            4 => {
                let prompt: Vec<u32> = (0..token() % 9).map(|_| token()).collect();
                let request = Request::new(&prompt).max_new_tokens(token() as usize);
                let request = request.stop_tokens(&[token()]).cached_prefix(token() as usize % 4);
                session.start(&request).is_ok()
            }
            5 => {
                session.prefill().map(|(_, mut picks)| picks.push(token())).is_ok()
                    && session.prefilled().is_ok()
            }
            6 => {
                let filled = session.proposal().map(|(_, lists)| {
                    for depth in 0..4 {
                        let (first, second) = (token(), token());
                        let count = if first == second { 1 } else { 2 };
                        let log_probs = [-0.1 * depth as f32, -1.0];
                        let _ = lists.push(&[first, second][..count], &log_probs[..count]);
                    }
                });
                filled.is_ok() && session.proposed().is_ok()
            }
            7 => {
                let picked = session.verification().map(|(round, mut picks)| {
                    let mask = round.mask();
                    assert!(mask.is_none_or(|mask| mask.slots() == round.tree().len()));
                    (0..round.tree().len()).for_each(|_| picks.push(token()));
                });
                picked.is_ok() && session.verified().is_ok()
            }
            _ => {
                let emits = session.outcome().map(|outcome| outcome.tokens().to_vec());
                let done = session.committed().is_ok();
                if done {
                    let emits = emits.expect("an outcome was committed");
                    assert_eq!(session.tokens(), [&before[..], &emits].concat());
                }
                done
            }
        };
        if call != 4 || !done {
            assert!(session.tokens().starts_with(&before), "tokens were taken back");
        }
        assert!(session.committed_len() <= session.tokens().len());
        assert!(session.committed_len() <= session.plan().capabilities().max_len);
        assert_eq!(
            session.need() == Need::Nothing,
            session.finish().is_some() || session.tokens().is_empty()
        );
    }
}

/// Targets of the candle backend.
#[cfg(feature = "candle")]
pub const CANDLE: [(&str, Target); 3] =
    [("config", config), ("checkpoint", checkpoint), ("gguf", gguf)];

/// Texts that are configurations, or nearly.
#[cfg(feature = "candle")]
pub fn config(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(config) = ddtree::candle::DecoderConfig::from_json(&text) {
        assert!(config.num_layers() > 0 && config.vocab_size > 0);
    }
    if let Ok(config) = ddtree::candle::dflash::DFlashConfig::from_json(&text) {
        assert!(config.block_size() > 0);
    }
}

/// Files that are safetensors, or nearly: they load whole or not at all.
#[cfg(feature = "candle")]
pub fn checkpoint(data: &[u8]) {
    use candle_core::{DType, Device};
    use ddtree::candle::Weights;

    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("model.safetensors");
    std::fs::write(&file, data).expect("a file in it");
    let Ok(mut weights) = Weights::open(folder.path(), DType::F32, &Device::Cpu) else { return };
    for (name, shape) in [("a", &[2, 3][..]), ("b", &[4])] {
        if let Ok(tensor) = weights.take(name, shape) {
            assert_eq!(tensor.dims(), shape);
        }
    }
    let _ = weights.finish();
}

/// Files that are GGUF models, or nearly: they load whole and run, or not at all.
#[cfg(feature = "candle")]
pub fn gguf(data: &[u8]) {
    use candle_core::{DType, Device};
    use ddtree::candle::{DecoderModel, Forward, Gguf, Rounding, Want};

    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), data).expect("room for it");
    let Ok(mut gguf) = Gguf::open(file.path()) else { return };
    let config = gguf.config();
    let Ok(weights) = gguf.into_weights(DType::F32, &Device::Cpu, Rounding::None) else { return };
    let Ok(config) = config else { return };
    let vocab_size = config.vocab_size;
    let Ok(model) = DecoderModel::new(config, weights) else { return };
    let mut cache = model.new_cache(1).expect("a position");
    let (tokens, positions, want) = (&[0], &[0], Want::All);
    let pass = Forward { tokens, positions, start: 0, mask: None, tree: None, want, taps: &[] };
    let output = model.forward(&mut cache, &pass).expect("a model that was loaded");
    assert_eq!(output.logits.expect("logits").dims(), [1, vocab_size]);
}
