//! The states of recurrent layers: what is committed, and what a pass adds before it is.

use super::config::DeltaNetConfig;
use super::delta_rule::{self, Factors, Rows};
use super::{Error, Result};
use crate::{DraftTree, StatePlan};

/// What recurrent layers keep of a tree until its outcome is known. Both ways are exact; they differ
/// in time and memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum StateMethod {
    /// The state after every slot. A commit copies one of them, and every state is what running the
    /// slot's path alone would have left, to the bit.
    PerSlot,
    /// The factors of every slot's update (a key, a corrected value and a decay per head), from which
    /// the outputs follow without forming states. A commit applies the updates of the accepted path
    /// to the committed state.
    #[default]
    Factors,
}

/// Committed states of every recurrent layer of one sequence, and those of a pass in progress.
///
/// A pass [`begin`](Self::begin)s, gives each [`layer`](Self::layer) what it needs, and
/// [`finish`](Self::finish)es. Committed states change only in [`commit`](Self::commit) and
/// [`extend`](Self::extend), neither of which can fail half way.
#[derive(Debug)]
pub(crate) struct StateCache {
    shape: DeltaNetConfig,
    method: StateMethod,
    layers: Vec<LayerState>,
    plan: StatePlan,
    pass: Pass,
    /// Whether every layer took part in `pass`.
    finished: bool,
}

/// The last pass: where it started, and what can become of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// There is none, or it failed.
    None,
    /// Rows up to `end` one after another; only the states at the end exist.
    Run { end: usize },
    /// A tree with its root at row `start`.
    Tree { start: usize },
}

#[derive(Debug, Default)]
struct LayerState {
    committed: State,
    /// After the last row of a run.
    ahead: State,
    /// The convolution's inputs of the slots of a tree, `[slots, channels]`.
    inputs: Vec<f32>,
    /// [`StateMethod::PerSlot`]: `[slots, value_heads, key_dim, value_dim]`.
    states: Vec<f32>,
    /// [`StateMethod::Factors`].
    factors: Factors,
}

/// What a recurrent layer carries from one token to the next.
#[derive(Debug, Default, Clone)]
pub(crate) struct State {
    /// `[value_heads, key_dim, value_dim]`.
    pub(crate) recurrent: Vec<f32>,
    /// The last inputs of the convolution, oldest first, `[kernel - 1, channels]`.
    pub(crate) window: Vec<f32>,
}

impl StateCache {
    pub(crate) fn new(shape: DeltaNetConfig, layers: usize) -> Self {
        let zero = State {
            recurrent: vec![0.0; shape.state_len()],
            window: vec![0.0; (shape.conv_kernel - 1) * shape.channels()],
        };
        let layer = || LayerState { committed: zero.clone(), ..LayerState::default() };
        Self {
            shape,
            method: StateMethod::default(),
            layers: (0..layers).map(|_| layer()).collect(),
            plan: StatePlan::new(shape.conv_kernel - 1),
            pass: Pass::None,
            finished: false,
        }
    }

    pub(crate) fn shape(&self) -> &DeltaNetConfig {
        &self.shape
    }

    pub(crate) fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Drops a pass in progress, whose leftovers have the form of the other method.
    pub(crate) fn set_method(&mut self, method: StateMethod) {
        self.method = method;
        self.drop_pass();
        for layer in &mut self.layers {
            (layer.states, layer.factors) = (Vec::new(), Factors::default());
        }
    }

    pub(crate) fn drop_pass(&mut self) {
        (self.pass, self.finished) = (Pass::None, false);
    }

    /// Bytes of the committed states, and bytes kept for the slots of the last tree.
    pub(crate) fn memory_usage(&self) -> (usize, usize) {
        let floats = |len: usize| len * size_of::<f32>();
        let state = |state: &State| floats(state.recurrent.len() + state.window.len());
        let committed = self.layers.iter().map(|layer| state(&layer.committed)).sum();
        let kept = |layer: &LayerState| {
            floats(layer.inputs.len() + layer.states.len()) + layer.factors.memory_usage()
        };
        (committed, self.layers.iter().map(kept).sum())
    }

    /// What `layer` has committed.
    pub(crate) fn committed(&self, layer: usize) -> Option<&State> {
        self.layers.get(layer).map(|layer| &layer.committed)
    }

    /// Begins a pass over `rows` rows from `start` on, after `committed` rows: over `tree`, or one
    /// after another without one.
    pub(crate) fn begin(
        &mut self,
        committed: usize,
        start: usize,
        rows: usize,
        tree: Option<&DraftTree>,
    ) -> Result<()> {
        let continues = self.finished && self.pass == Pass::Run { end: start };
        self.drop_pass();
        match tree {
            Some(tree) if tree.len() != rows => {
                let found = format!("{} slots", tree.len());
                return Err(Error::argument("tree", found, format!("{rows}, one per token")));
            }
            Some(tree) if start == committed => {
                self.plan.set(tree);
                self.pass = Pass::Tree { start };
            }
            None if start == committed || continues => {
                if start == committed {
                    for layer in &mut self.layers {
                        layer.ahead.clone_from(&layer.committed);
                    }
                }
                self.pass = Pass::Run { end: start + rows };
            }
            _ => {
                let accepted = format!("{committed}, as recurrent layers start at a known state");
                return Err(Error::argument("start", start, accepted));
            }
        }
        Ok(())
    }

    /// What the pass needs of one layer.
    pub(crate) fn layer(&mut self, layer: usize) -> LayerPass<'_> {
        let plan = matches!(self.pass, Pass::Tree { .. }).then_some(&self.plan);
        let (shape, method) = (&self.shape, self.method);
        LayerPass { shape, method, plan, state: &mut self.layers[layer] }
    }

    /// Ends a pass that every layer took part in.
    pub(crate) fn finish(&mut self) {
        self.finished = true;
    }

    /// Takes note of the accepted slots of the tree that was run from row `start` on; nothing is
    /// committed before [`commit`](Self::commit).
    pub(crate) fn accept(&mut self, start: usize, slots: &[u32]) -> Result<()> {
        if !self.finished || self.pass != (Pass::Tree { start }) {
            let accepted = format!("slots of a tree run from row {start} on");
            return Err(Error::argument("slots", format!("{slots:?}"), accepted));
        }
        Ok(self.plan.accept(slots)?)
    }

    /// Commits the states of the accepted slots.
    pub(crate) fn commit(&mut self) {
        let Some(source) = self.plan.source() else { return };
        let (shape, plan) = (&self.shape, &self.plan);
        for LayerState { committed, ahead, inputs, states, factors } in &mut self.layers {
            ahead.window.clear();
            for &input in plan.window() {
                ahead.window.extend_from_slice(shape.input(&committed.window, inputs, input));
            }
            std::mem::swap(&mut committed.window, &mut ahead.window);
            match self.method {
                StateMethod::PerSlot => {
                    let len = shape.state_len();
                    committed.recurrent.copy_from_slice(&states[source * len..][..len]);
                }
                StateMethod::Factors => {
                    delta_rule::replay(shape, factors, plan.path(), &mut committed.recurrent);
                }
            }
        }
        self.drop_pass();
    }

    /// Whether the last pass was a run that ends at row `end`.
    pub(crate) fn runs_to(&self, end: usize) -> bool {
        self.finished && self.pass == Pass::Run { end }
    }

    /// Commits the states after the last run.
    pub(crate) fn extend(&mut self) {
        for layer in &mut self.layers {
            std::mem::swap(&mut layer.committed, &mut layer.ahead);
        }
        self.drop_pass();
    }

    /// Goes back to the states before the first token.
    pub(crate) fn clear(&mut self) {
        for layer in &mut self.layers {
            layer.committed.recurrent.fill(0.0);
            layer.committed.window.fill(0.0);
        }
        self.drop_pass();
    }
}

/// One layer's part in a pass.
#[derive(Debug)]
pub(crate) struct LayerPass<'a> {
    shape: &'a DeltaNetConfig,
    method: StateMethod,
    /// Nothing for a run.
    plan: Option<&'a StatePlan>,
    state: &'a mut LayerState,
}

impl LayerPass<'_> {
    /// The input of the convolution that is `distance` tokens before that of `row` (which is at
    /// distance 0); `inputs` are those of the pass.
    pub(crate) fn input<'b>(&'b self, inputs: &'b [f32], row: usize, distance: usize) -> &'b [f32] {
        let (window, input) = match self.plan {
            Some(plan) if distance > 0 => {
                (&self.state.committed.window, plan.ancestors(row)[distance - 1])
            }
            Some(_) => (&self.state.committed.window, row as i32),
            None => (&self.state.ahead.window, row as i32 - distance as i32),
        };
        self.shape.input(window, inputs, input)
    }

    /// Runs the recurrence and gives its outputs, `[rows, value_heads, value_dim]`.
    pub(crate) fn run(&mut self, rows: &Rows) -> Vec<f32> {
        let LayerState { committed, ahead, states, factors, .. } = &mut *self.state;
        let Some(plan) = self.plan else {
            return delta_rule::run(self.shape, rows, &mut ahead.recurrent);
        };
        let (parents, state) = (plan.parents(), &committed.recurrent);
        match self.method {
            StateMethod::PerSlot => {
                delta_rule::run_states(self.shape, rows, parents, state, states)
            }
            StateMethod::Factors => {
                delta_rule::run_factors(self.shape, rows, parents, state, factors)
            }
        }
    }

    /// Takes the inputs of the convolution, once it has run.
    pub(crate) fn keep_inputs(self, inputs: Vec<f32>) {
        if self.plan.is_some() {
            self.state.inputs = inputs;
            return;
        }
        let window = &mut self.state.ahead.window;
        let len = window.len();
        window.extend_from_slice(&inputs);
        window.drain(..window.len() - len);
    }
}
