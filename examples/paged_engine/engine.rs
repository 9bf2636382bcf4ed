//! The scheduler: continuous batching over sessions. Each tick, all sequences go one step in one
//! pass of the model, whether they prefill or verify.

use std::collections::{HashMap, VecDeque};

use ddtree::{
    Capabilities, Config, Error, Finish, Need, Plan, Proposal, Request, Session,
    layout::{
        bits,
        kv::{self, Pages},
        slots,
    },
    tree::SharedBudget,
};

use super::model::{self, Batch, DeviceError, Model, PAGE_SIZE, VOCAB};

/// Rows of one sequence at most.
const MAX_LEN: usize = 256;
const HORIZON: usize = 7;

pub struct Limits {
    /// Sequences of a batch at most.
    pub sequences: usize,
    /// Nodes of one tree at most.
    pub nodes_per_sequence: usize,
    /// Nodes of all trees of a batch at most.
    pub nodes: usize,
}

/// What a tick did for one request.
#[derive(Debug)]
pub struct Event {
    pub id: u64,
    pub tokens: Vec<u32>,
    pub finish: Option<Finish>,
}

#[derive(Debug, Default)]
pub struct Counters {
    pub passes: u64,
    pub failures: u64,
    pub tokens: u64,
    pub reused_rows: usize,
    pub largest_batch: usize,
    pub truncated_trees: u64,
}

struct Sequence {
    id: u64,
    session: Session,
    drafter: Lookup,
    table: Vec<u32>,
}

pub struct Engine {
    pub model: Model,
    pub counters: Counters,
    limits: Limits,
    plan: Plan,
    waiting: VecDeque<(u64, Vec<u32>, usize)>,
    running: Vec<Sequence>,
    /// Pages that there are.
    pages: usize,
    /// Full pages by the tokens of all rows up to their end.
    prefixes: HashMap<Vec<u32>, u32>,
    shared: SharedBudget,
    next_id: u64,
}

impl Engine {
    pub fn new(model: Model, limits: Limits) -> Result<Self, Error> {
        let capabilities = Capabilities::new(VOCAB as usize, MAX_LEN);
        let config = Config::default().budget(limits.nodes_per_sequence).top_k(2);
        Ok(Self {
            pages: model.free_pages(),
            model,
            counters: Counters::default(),
            plan: Plan::resolve(&config, &capabilities, HORIZON)?,
            limits,
            waiting: VecDeque::new(),
            running: Vec::new(),
            prefixes: HashMap::new(),
            shared: SharedBudget::new(),
            next_id: 0,
        })
    }

    /// Queues a request, unless it is one that could never run.
    pub fn submit(&mut self, prompt: &[u32], max_new_tokens: usize) -> Result<u64, Error> {
        let request = Request::new(prompt).max_new_tokens(max_new_tokens);
        Session::new(self.plan.clone()).start(&request)?;
        let pages = self.pages_of(prompt, max_new_tokens);
        if pages > self.pages {
            return Err(Error::Setting {
                field: "max_new_tokens",
                found: format!("{max_new_tokens}, which takes {pages} pages"),
                accepted: format!("what fits into {}", self.pages),
            });
        }
        self.next_id += 1;
        self.waiting.push_back((self.next_id, prompt.to_vec(), max_new_tokens));
        Ok(self.next_id)
    }

    /// Pages for the whole of a request.
    fn pages_of(&self, prompt: &[u32], max_new_tokens: usize) -> usize {
        let rows = prompt.len().saturating_add(max_new_tokens).min(MAX_LEN);
        (rows + self.plan.max_slots()).div_ceil(PAGE_SIZE)
    }

    /// A session can be dropped at any time; only its pages have to go back.
    pub fn cancel(&mut self, id: u64) {
        self.waiting.retain(|waiting| waiting.0 != id);
        if let Some(index) = self.running.iter().position(|sequence| sequence.id == id) {
            let sequence = self.running.swap_remove(index);
            sequence.table.iter().for_each(|&page| self.model.release(page));
        }
    }

    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// One step of every sequence.
    pub fn tick(&mut self) -> Result<Vec<Event>, Error> {
        self.admit()?;
        for sequence in &mut self.running {
            if sequence.session.need() == Need::Proposal {
                sequence.propose()?;
            }
        }
        self.share_budget()?;
        if self.running.is_empty() {
            return Ok(Vec::new());
        }
        let mut batch = Batch { qo_indptr: vec![0], mask_indptr: vec![0], ..Batch::default() };
        for sequence in &mut self.running {
            sequence.enter(&mut batch)?;
        }
        self.counters.largest_batch = self.counters.largest_batch.max(self.running.len());
        self.counters.passes += 1;
        let result = self.model.forward(&batch);
        let mut events = Vec::new();
        match result {
            Ok(picks) => {
                for (index, sequence) in self.running.iter_mut().enumerate() {
                    let rows = batch.qo_indptr[index] as usize..batch.qo_indptr[index + 1] as usize;
                    match sequence.take(&picks[rows], &mut self.model) {
                        Ok(()) => {}
                        Err(Failed::Refused(error)) => return Err(error),
                        Err(Failed::Device) => {
                            // This sequence alone is back at its last committed token.
                            self.counters.failures += 1;
                            sequence.session.abandon();
                            continue;
                        }
                    }
                    let tokens = sequence.session.new_tokens().to_vec();
                    self.counters.tokens += tokens.len() as u64;
                    events.push(Event {
                        id: sequence.id,
                        tokens,
                        finish: sequence.session.finish(),
                    });
                }
            }
            Err(DeviceError) => {
                // No sequence has lost anything: rows beyond the committed ones are void.
                self.counters.failures += 1;
                self.running.iter_mut().for_each(|sequence| sequence.session.abandon());
            }
        }
        self.retire();
        Ok(events)
    }

    /// Lets requests in while there are pages for the whole of them, so that no running sequence can
    /// run out.
    fn admit(&mut self) -> Result<(), Error> {
        while self.running.len() < self.limits.sequences {
            let Some((_, prompt, max_new_tokens)) = self.waiting.front() else { break };
            let pages = self.pages_of(prompt, *max_new_tokens);
            let mut table = self.cached_pages(prompt);
            table.iter().for_each(|&page| self.model.share(page));
            let missing = pages - table.len();
            if self.model.free_pages() < missing {
                self.drop_prefixes();
            }
            if self.model.free_pages() < missing {
                table.into_iter().for_each(|page| self.model.release(page));
                break;
            }
            let cached = table.len() * PAGE_SIZE;
            table.extend((0..missing).filter_map(|_| self.model.allocate()));
            let Some((id, prompt, max_new_tokens)) = self.waiting.pop_front() else { break };
            let mut session = Session::new(self.plan.clone());
            let request = Request::new(&prompt).max_new_tokens(max_new_tokens);
            session.start(&request.cached_prefix(cached))?;
            self.counters.reused_rows += cached;
            let drafter = Lookup { start: cached, tokens: Vec::new() };
            self.running.push(Sequence { id, session, drafter, table });
        }
        Ok(())
    }

    /// Pages of the longest prefix of a prompt that is cached; its last token is always forwarded.
    fn cached_pages(&self, prompt: &[u32]) -> Vec<u32> {
        let ends = (1..).map(|pages| pages * PAGE_SIZE).take_while(|&end| end < prompt.len());
        ends.map_while(|end| self.prefixes.get(&prompt[..end]).copied()).collect()
    }

    fn share_budget(&mut self) -> Result<(), Error> {
        let nodes = self.limits.nodes;
        let kept = self.shared.split(nodes, &self.running, |sequence| sequence.session.tree().ok());
        for (sequence, &nodes) in self.running.iter_mut().zip(kept) {
            if sequence.session.tree().is_ok_and(|tree| nodes < tree.nodes()) {
                self.counters.truncated_trees += 1;
                sequence.session.truncate_tree(nodes)?;
            }
        }
        Ok(())
    }

    /// Keeps the full pages of finished sequences as prefixes, and returns the others.
    fn retire(&mut self) {
        for index in (0..self.running.len()).rev() {
            if self.running[index].session.need() != Need::Nothing {
                continue;
            }
            let Sequence { session, table, .. } = self.running.swap_remove(index);
            let committed = &session.tokens()[..session.committed_len()];
            for (number, &page) in table.iter().enumerate() {
                let end = (number + 1) * PAGE_SIZE;
                let is_new =
                    end <= committed.len() && !self.prefixes.contains_key(&committed[..end]);
                if is_new {
                    self.prefixes.insert(committed[..end].to_vec(), page);
                } else {
                    self.model.release(page);
                }
            }
        }
    }

    pub fn drop_prefixes(&mut self) {
        self.prefixes.drain().for_each(|(_, page)| self.model.release(page));
    }
}

/// Why a step of one sequence did not happen.
#[derive(Debug)]
enum Failed {
    Device,
    Refused(Error),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

impl From<DeviceError> for Failed {
    fn from(DeviceError: DeviceError) -> Self {
        Self::Device
    }
}

impl Sequence {
    fn propose(&mut self) -> Result<(), Error> {
        self.drafter.observe(&self.session);
        let (request, proposal) = self.session.proposal()?;
        self.drafter.propose(request.root(), request.horizon(), proposal)?;
        self.session.proposed()
    }

    /// Adds this sequence's rows to a batch.
    fn enter(&mut self, batch: &mut Batch) -> Result<(), Error> {
        let first = batch.tokens.len();
        let start = self.session.committed_len();
        if self.session.need() == Need::Prefill {
            let (prefill, _) = self.session.prefill()?;
            batch.tokens.extend(prefill.tokens());
            batch.positions.extend((start as i64..).take(prefill.tokens().len()));
        } else {
            let (round, _) = self.session.verification()?;
            let (tree, count) = (round.tree(), round.tree().len());
            batch.tokens.extend(tree.tokens());
            batch.positions.resize(first + count, 0);
            slots::write_positions(tree, start, &mut batch.positions[first..])?;
            if let Some(mask) = round.mask() {
                let at = batch.packed_mask.len();
                batch.packed_mask.resize(at + bits::packed_len(count, start), 0);
                bits::write_packed(mask, start, &mut batch.packed_mask[at..])?;
            }
        }
        let end = batch.tokens.len();
        batch.slot_mapping.resize(end, 0);
        let pages = Pages::new(&self.table, PAGE_SIZE)?;
        kv::write_places(&pages, start, end - first, &mut batch.slot_mapping[first..])?;
        batch.qo_indptr.push(end as i32);
        batch.mask_indptr.push(batch.packed_mask.len() as i32);
        batch.prefixes.push(start);
        batch.tables.push(self.table.clone());
        Ok(())
    }

    /// Takes the picks of this sequence's rows, and commits.
    fn take(&mut self, picked: &[u32], model: &mut Model) -> Result<(), Failed> {
        if self.session.need() == Need::Prefill {
            let (_, mut picks) = self.session.prefill()?;
            picks.extend(picked.last().map_or(&[], std::slice::from_ref));
            return Ok(self.session.prefilled()?);
        }
        let (_, mut picks) = self.session.verification()?;
        picks.extend(picked);
        self.session.verified()?;
        let plan = self.session.commit()?;
        let pages = Pages::new(&self.table, PAGE_SIZE)?;
        let mut moves = [(0, 0); HORIZON + 1];
        let count = kv::write_moves(plan, &pages, &mut moves)?;
        model.move_rows(&moves[..count])?;
        Ok(self.session.committed()?)
    }
}

/// Drafts what followed the last token earlier in the text, or a fixed guess. It sees only what its
/// engine forwarded: after a prefix was reused, its context starts late.
struct Lookup {
    start: usize,
    tokens: Vec<u32>,
}

impl Lookup {
    fn observe(&mut self, session: &Session) {
        let seen = self.start + self.tokens.len();
        self.tokens.extend(&session.tokens()[seen..session.committed_len()]);
    }

    fn propose(&self, root: u32, horizon: usize, proposal: &mut Proposal) -> Result<(), Error> {
        let mut token = root;
        for _ in 0..horizon {
            let earlier = self.tokens.windows(2).rev().find(|pair| pair[0] == token);
            let first = earlier.map_or(model::first_choice(token), |pair| pair[1]);
            let mut second = model::second_choice(token);
            if second == first {
                second = model::first_choice(token);
            }
            let both = [first, second];
            let distinct = if first == second { 1 } else { 2 };
            proposal.push(&both[..distinct], &[0.6f32.ln(), 0.25f32.ln()][..distinct])?;
            token = first;
        }
        Ok(())
    }
}
