//! The gated delta rule on slices: one recurrence, three ways to run it.
//!
//! Per value head, with the state `S` (`[key_dim, value_dim]`), unit key `k`, scaled unit query `q`,
//! value `v`, decay `d` in (0, 1] and write strength `beta` in (0, 1):
//!
//! ```text
//! S <- d S;   u = beta (v - S^T k);   S <- S + k u^T;   output = S^T q
//! ```
//!
//! * [`run`]: one row after another over one state.
//! * [`run_states`]: every row from the state after its parent, all states kept.
//! * [`run_factors`]: only `k`, `u` and `d` are kept. With `D(j, i)` the product of the decays on the
//!   path below `j` down to `i` and `S0` the state before the tree,
//!   `u_i = beta_i (v_i - D(-1, i) S0^T k_i - sum_j D(j, i) (k_j . k_i) u_j)` over the ancestors `j`
//!   of `i`: a unit lower triangular system whose pattern is the ancestor matrix, solved row by row.
//!   (The same system for chains is the WY form of the chunked delta rule, arXiv 2412.06464.) A
//!   state is rebuilt from the factors of its path by [`replay`].
//!
//! Everything is f32. The arithmetic of a row does not depend on how many rows run with it.

use super::config::DeltaNetConfig;

/// What the recurrence reads of `n` rows, heads side by side in each row.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    /// Unit queries times `key_dim^-0.5`, `[n, key_heads, key_dim]`.
    pub(crate) q: Vec<f32>,
    /// Unit keys, `[n, key_heads, key_dim]`.
    pub(crate) k: Vec<f32>,
    /// Values, `[n, value_heads, value_dim]`.
    pub(crate) v: Vec<f32>,
    /// Decays, `[n, value_heads]`.
    pub(crate) decay: Vec<f32>,
    /// Write strengths, `[n, value_heads]`.
    pub(crate) beta: Vec<f32>,
}

/// What [`run_factors`] keeps of the rows of a tree.
#[derive(Debug, Default)]
pub(crate) struct Factors {
    k: Vec<f32>,
    u: Vec<f32>,
    decay: Vec<f32>,
}

impl Factors {
    pub(crate) fn memory_usage(&self) -> usize {
        size_of::<f32>() * (self.k.len() + self.u.len() + self.decay.len())
    }
}

/// One row of one head: its vectors and scalars.
struct Row<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    decay: f32,
    beta: f32,
}

impl Rows {
    /// `head` is a value head; it reads the key head of its group.
    fn row(&self, shape: &DeltaNetConfig, row: usize, head: usize) -> Row<'_> {
        let key_head = row * shape.key_heads + head / shape.group();
        let value_head = row * shape.value_heads + head;
        Row {
            q: vector(&self.q, key_head, shape.key_dim),
            k: vector(&self.k, key_head, shape.key_dim),
            v: vector(&self.v, value_head, shape.value_dim),
            decay: self.decay[value_head],
            beta: self.beta[value_head],
        }
    }

    fn len(&self, shape: &DeltaNetConfig) -> usize {
        self.beta.len() / shape.value_heads
    }
}

fn vector(values: &[f32], index: usize, len: usize) -> &[f32] {
    &values[index * len..][..len]
}

fn vector_mut(values: &mut [f32], index: usize, len: usize) -> &mut [f32] {
    &mut values[index * len..][..len]
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `y += factor * x`
fn add_scaled(y: &mut [f32], factor: f32, x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += factor * x;
    }
}

/// `y += S^T x` for `S` of `x.len()` rows, four at a time: `y` is then loaded and stored a quarter as
/// often.
fn add_transposed(y: &mut [f32], state: &[f32], x: &[f32]) {
    let len = y.len();
    let (fours, rest) = x.as_chunks::<4>();
    for (lines, x) in state.chunks_exact(4 * len).zip(fours) {
        let (a, lines) = lines.split_at(len);
        let (b, lines) = lines.split_at(len);
        let (c, d) = lines.split_at(len);
        for ((((y, a), b), c), d) in y.iter_mut().zip(a).zip(b).zip(c).zip(d) {
            *y += (x[0] * a + x[1] * b) + (x[2] * c + x[3] * d);
        }
    }
    let done = 4 * len * fours.len();
    for (line, &x) in state[done..].chunks_exact(len).zip(rest) {
        add_scaled(y, x, line);
    }
}

/// `S <- decay S + k u^T`
fn write(state: &mut [f32], decay: f32, k: &[f32], u: &[f32]) {
    for (line, &k) in state.chunks_exact_mut(u.len()).zip(k) {
        for (s, u) in line.iter_mut().zip(u) {
            *s = decay * *s + k * u;
        }
    }
}

/// One row over the state of one head; `u` is scratch of `value_dim` values. Adds to `output`.
fn step(state: &mut [f32], row: &Row<'_>, u: &mut [f32], output: &mut [f32]) {
    u.fill(0.0);
    add_transposed(u, state, row.k);
    for (u, v) in u.iter_mut().zip(row.v) {
        *u = row.beta * (v - row.decay * *u);
    }
    write(state, row.decay, row.k, u);
    add_transposed(output, state, row.q);
}

/// Runs the rows one after another over `state` (`[value_heads, key_dim, value_dim]`) and gives
/// their outputs, `[n, value_heads, value_dim]`.
pub(crate) fn run(shape: &DeltaNetConfig, rows: &Rows, state: &mut [f32]) -> Vec<f32> {
    let mut output = vec![0.0; rows.v.len()];
    let mut u = vec![0.0; shape.value_dim];
    for (head, state) in state.chunks_exact_mut(shape.head_state_len()).enumerate() {
        for row in 0..rows.len(shape) {
            let output = vector_mut(&mut output, row * shape.value_heads + head, shape.value_dim);
            step(state, &rows.row(shape, row, head), &mut u, output);
        }
    }
    output
}

/// Runs every row from the state after its parent, or from `state` for parent -1. `states` takes the
/// state after every row, `[n, value_heads, key_dim, value_dim]`. Gives the outputs.
pub(crate) fn run_states(
    shape: &DeltaNetConfig,
    rows: &Rows,
    parents: &[i32],
    state: &[f32],
    states: &mut Vec<f32>,
) -> Vec<f32> {
    let (len, head_len) = (shape.state_len(), shape.head_state_len());
    states.resize(parents.len() * len, 0.0);
    let mut output = vec![0.0; rows.v.len()];
    let mut u = vec![0.0; shape.value_dim];
    for head in 0..shape.value_heads {
        for (row, &parent) in parents.iter().enumerate() {
            let (earlier, later) = states.split_at_mut(row * len);
            let source = match usize::try_from(parent) {
                Ok(parent) => vector(earlier, parent * shape.value_heads + head, head_len),
                Err(_) => vector(state, head, head_len),
            };
            let state = vector_mut(later, head, head_len);
            state.copy_from_slice(source);
            let output = vector_mut(&mut output, row * shape.value_heads + head, shape.value_dim);
            step(state, &rows.row(shape, row, head), &mut u, output);
        }
    }
    output
}

/// Runs every row from the state after its parent, or from `state` for parent -1, without forming
/// those states. `factors` takes what [`replay`] needs. Gives the outputs.
pub(crate) fn run_factors(
    shape: &DeltaNetConfig,
    rows: &Rows,
    parents: &[i32],
    state: &[f32],
    factors: &mut Factors,
) -> Vec<f32> {
    let (heads, value_dim) = (shape.value_heads, shape.value_dim);
    factors.k.clone_from(&rows.k);
    factors.decay.clone_from(&rows.decay);
    factors.u.clear();
    factors.u.resize(rows.v.len(), 0.0);
    let mut output = vec![0.0; rows.v.len()];
    // Of the row at hand: its ancestors, nearest first, and their keys times its key and its query.
    let mut path: Vec<(usize, f32, f32)> = Vec::new();
    for key_head in 0..shape.key_heads {
        for row in 0..parents.len() {
            let Row { q, k, .. } = rows.row(shape, row, key_head * shape.group());
            path.clear();
            let mut above = parents[row];
            while let Ok(ancestor) = usize::try_from(above) {
                let other = vector(&rows.k, ancestor * shape.key_heads + key_head, shape.key_dim);
                path.push((ancestor, dot(other, k), dot(other, q)));
                above = parents[ancestor];
            }
            for head in key_head * shape.group()..(key_head + 1) * shape.group() {
                let Row { v, decay, beta, .. } = rows.row(shape, row, head);
                let state = vector(state, head, shape.head_state_len());
                let (earlier, later) = factors.u.split_at_mut(row * heads * value_dim);
                let u = vector_mut(later, head, value_dim);
                let output = vector_mut(&mut output, row * heads + head, value_dim);
                add_transposed(u, state, k);
                add_transposed(output, state, q);

                // The decay from the state before the tree down to this row.
                let total = path.iter().fold(decay, |d, &(j, ..)| d * rows.decay[j * heads + head]);
                for (u, output) in u.iter_mut().zip(output.iter_mut()) {
                    (*u, *output) = (total * *u, total * *output);
                }
                let mut weight = decay;
                for &(ancestor, key, query) in &path {
                    let other = vector(earlier, ancestor * heads + head, value_dim);
                    add_scaled(u, weight * key, other);
                    add_scaled(output, weight * query, other);
                    weight *= rows.decay[ancestor * heads + head];
                }
                for (u, v) in u.iter_mut().zip(v) {
                    *u = beta * (v - *u);
                }
                add_scaled(output, dot(k, q), u);
            }
        }
    }
    output
}

/// Brings `state` from before the tree to after the last row of `path` (root first).
pub(crate) fn replay(shape: &DeltaNetConfig, factors: &Factors, path: &[u32], state: &mut [f32]) {
    for (head, state) in state.chunks_exact_mut(shape.head_state_len()).enumerate() {
        for &row in path {
            let key_head = row as usize * shape.key_heads + head / shape.group();
            let value_head = row as usize * shape.value_heads + head;
            write(
                state,
                factors.decay[value_head],
                vector(&factors.k, key_head, shape.key_dim),
                vector(&factors.u, value_head, shape.value_dim),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng, rngs::StdRng};

    use super::*;

    fn unit(mut vector: Vec<f32>) -> Vec<f32> {
        let length = dot(&vector, &vector).sqrt();
        vector.iter_mut().for_each(|x| *x /= length);
        vector
    }

    fn random_shape(rng: &mut StdRng) -> DeltaNetConfig {
        let key_heads = rng.random_range(1..=3);
        DeltaNetConfig {
            key_heads,
            value_heads: key_heads * rng.random_range(1..=3),
            key_dim: rng.random_range(1..=17),
            value_dim: rng.random_range(1..=17),
            conv_kernel: 4,
        }
    }

    fn random_rows(rng: &mut StdRng, shape: &DeltaNetConfig, n: usize) -> Rows {
        let mut vectors = |count: usize, len: usize| -> Vec<f32> {
            let vector = |_| unit((0..len).map(|_| rng.random_range(-1f32..1.0)).collect());
            (0..count).flat_map(vector).collect()
        };
        Rows {
            q: vectors(n * shape.key_heads, shape.key_dim),
            k: vectors(n * shape.key_heads, shape.key_dim),
            v: vectors(n * shape.value_heads, shape.value_dim),
            decay: (0..n * shape.value_heads).map(|_| rng.random_range(0.01..=1.0)).collect(),
            beta: (0..n * shape.value_heads).map(|_| rng.random_range(0.0..1.0)).collect(),
        }
    }

    fn random_state(rng: &mut StdRng, shape: &DeltaNetConfig) -> Vec<f32> {
        (0..shape.state_len()).map(|_| rng.random_range(-1f32..1.0)).collect()
    }

    fn random_parents(rng: &mut StdRng, n: usize) -> Vec<i32> {
        (0..n as i32).map(|row| if row == 0 { -1 } else { rng.random_range(0..row) }).collect()
    }

    /// The recurrence as it is written down, in f64, over the rows of one path. Gives the state and
    /// the output of the last row.
    fn naive(
        shape: &DeltaNetConfig,
        rows: &Rows,
        path: &[u32],
        state: &[f32],
    ) -> (Vec<f64>, Vec<f64>) {
        let (keys, values) = (shape.key_dim, shape.value_dim);
        let mut state: Vec<f64> = state.iter().map(|&x| f64::from(x)).collect();
        let mut output = vec![0.0; shape.value_size()];
        for &row in path {
            for head in 0..shape.value_heads {
                let Row { q, k, v, decay, beta } = rows.row(shape, row as usize, head);
                let state = &mut state[head * keys * values..][..keys * values];
                state.iter_mut().for_each(|s| *s *= f64::from(decay));
                for c in 0..values {
                    let read = |s: &[f64], x: &[f32]| -> f64 {
                        (0..keys).map(|r| s[r * values + c] * f64::from(x[r])).sum()
                    };
                    let u = f64::from(beta) * (f64::from(v[c]) - read(state, k));
                    for r in 0..keys {
                        state[r * values + c] += f64::from(k[r]) * u;
                    }
                    output[head * values + c] = read(state, q);
                }
            }
        }
        (state, output)
    }

    fn path(parents: &[i32], row: usize) -> Vec<u32> {
        let mut path = vec![row as u32];
        while let Ok(parent) = u32::try_from(parents[path[0] as usize]) {
            path.insert(0, parent);
        }
        path
    }

    #[track_caller]
    fn close(found: &[f32], expected: &[f64], tolerance: f64) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((f64::from(*found) - expected).abs() < tolerance, "{found} {expected}");
        }
    }

    #[test]
    fn both_methods_equal_the_naive_recurrence_over_every_path() {
        let mut rng = StdRng::seed_from_u64(1);
        // Memory is reused from larger and smaller trees.
        let (mut states, mut factors) = (Vec::new(), Factors::default());
        for n in [1, 2, 20, 7, 33] {
            let shape = random_shape(&mut rng);
            let rows = random_rows(&mut rng, &shape, n);
            let parents = random_parents(&mut rng, n);
            let state = random_state(&mut rng, &shape);
            let by_state = run_states(&shape, &rows, &parents, &state, &mut states);
            let by_factor = run_factors(&shape, &rows, &parents, &state, &mut factors);
            for row in 0..n {
                let path = path(&parents, row);
                let (expected_state, expected) = naive(&shape, &rows, &path, &state);
                close(vector(&by_state, row, shape.value_size()), &expected, 1e-5);
                close(vector(&by_factor, row, shape.value_size()), &expected, 1e-5);
                close(vector(&states, row, shape.state_len()), &expected_state, 1e-5);
                let mut rebuilt = state.clone();
                replay(&shape, &factors, &path, &mut rebuilt);
                close(&rebuilt, &expected_state, 1e-5);
            }
        }
    }

    #[test]
    fn a_state_of_a_tree_is_that_of_its_path_run_alone_to_the_bit() {
        let mut rng = StdRng::seed_from_u64(2);
        let shape = random_shape(&mut rng);
        let rows = random_rows(&mut rng, &shape, 20);
        let parents = random_parents(&mut rng, 20);
        let state = random_state(&mut rng, &shape);
        let mut states = Vec::new();
        let outputs = run_states(&shape, &rows, &parents, &state, &mut states);
        for row in 0..20 {
            let mut alone = Rows::default();
            for row in path(&parents, row) {
                let row = row as usize;
                let keys = shape.key_heads * shape.key_dim;
                alone.q.extend_from_slice(vector(&rows.q, row, keys));
                alone.k.extend_from_slice(vector(&rows.k, row, keys));
                alone.v.extend_from_slice(vector(&rows.v, row, shape.value_size()));
                alone.decay.extend_from_slice(vector(&rows.decay, row, shape.value_heads));
                alone.beta.extend_from_slice(vector(&rows.beta, row, shape.value_heads));
            }
            let mut ran = state.clone();
            let output = run(&shape, &alone, &mut ran);
            assert_eq!(ran, vector(&states, row, shape.state_len()));
            let last = &output[output.len() - shape.value_size()..];
            assert_eq!(last, vector(&outputs, row, shape.value_size()));
        }
    }

    /// Equal keys, full write strength, no decay: nothing damps an error on its way down.
    #[test]
    fn the_solve_stays_accurate_on_long_paths_of_equal_keys() {
        let mut rng = StdRng::seed_from_u64(3);
        let shape = DeltaNetConfig {
            key_heads: 1,
            value_heads: 1,
            key_dim: 8,
            value_dim: 4,
            conv_kernel: 4,
        };
        let n = 256;
        let mut rows = random_rows(&mut rng, &shape, n);
        let key = rows.k[..8].to_vec();
        rows.k = key.repeat(n);
        rows.decay.fill(1.0);
        rows.beta.fill(1.0);
        let parents: Vec<i32> = (-1..n as i32 - 1).collect();
        let (state, mut factors) = (random_state(&mut rng, &shape), Factors::default());
        let outputs = run_factors(&shape, &rows, &parents, &state, &mut factors);
        let path = path(&parents, n - 1);
        let (expected_state, expected) = naive(&shape, &rows, &path, &state);
        close(vector(&outputs, n - 1, 4), &expected, 1e-4);
        let mut rebuilt = state;
        replay(&shape, &factors, &path, &mut rebuilt);
        close(&rebuilt, &expected_state, 1e-4);
    }
}
