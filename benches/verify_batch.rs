//! Verification of 8 sequences on the CPU in f32, one by one and as a batch: 16 slots each, and one slot
//! each. A model of random weights of 28M parameters.
//!
//! `cargo bench --bench verify_batch`; `-- --test` runs everything once.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use criterion::{Criterion, criterion_group, criterion_main};
use ddtree::{
    AncestorMask, DraftTree, Picks, Prefill, Round, Verifier,
    candle::{BatchEntry, CandleTarget, DecoderConfig, DecoderModel, Weights, verify_batch},
};
use rand::{Rng, SeedableRng, rngs::StdRng};

const SEQUENCES: usize = 8;
const PROMPT: usize = 48;
const VOCABULARY: u32 = 8_192;

const CONFIG: &str = r#"{
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 256, "tie_word_embeddings": true,
    "attention_bias": false, "eos_token_id": 0
}"#;

fn model() -> DecoderModel {
    let mut rng = StdRng::seed_from_u64(6);
    let mut tensors = HashMap::new();
    let mut add = |name: String, shape: &[usize]| {
        let values = (0..shape.iter().product()).map(|_| rng.random_range(-0.05..0.05f32));
        let tensor = Tensor::from_vec(Vec::from_iter(values), shape, &Device::Cpu).unwrap();
        tensors.insert(format!("{name}.weight"), tensor);
    };
    add("model.embed_tokens".into(), &[8192, 512]);
    add("model.norm".into(), &[512]);
    for layer in 0..8 {
        for (name, shape) in [
            ("input_layernorm", &[512][..]),
            ("post_attention_layernorm", &[512]),
            ("self_attn.q_proj", &[512, 512]),
            ("self_attn.k_proj", &[256, 512]),
            ("self_attn.v_proj", &[256, 512]),
            ("self_attn.o_proj", &[512, 512]),
            ("self_attn.q_norm", &[64]),
            ("self_attn.k_norm", &[64]),
            ("mlp.gate_proj", &[1408, 512]),
            ("mlp.up_proj", &[1408, 512]),
            ("mlp.down_proj", &[512, 1408]),
        ] {
            add(format!("model.layers.{layer}.{name}"), shape);
        }
    }
    let weights = Weights::from_tensors(tensors, DType::F32, &Device::Cpu).unwrap();
    DecoderModel::new(DecoderConfig::from_json(CONFIG).unwrap(), weights).unwrap()
}

struct Sequence {
    target: CandleTarget,
    tree: DraftTree,
    /// Of a tree that is no chain.
    mask: Option<AncestorMask>,
}

/// Sequences with a binary tree each.
fn sequences(model: &DecoderModel, slots: usize) -> Vec<Sequence> {
    let mut rng = StdRng::seed_from_u64(7);
    let mut sequence = |_| {
        let mut random = || rng.random_range(0..VOCABULARY);
        let mut target = CandleTarget::new(model.clone(), 128, &[]).unwrap();
        let prompt: Vec<u32> = (0..PROMPT).map(|_| random()).collect();
        target.prefill(&Prefill::new(0, &prompt), &mut Picks::new(&mut Vec::new())).unwrap();
        let mut tree = DraftTree::new(random());
        while tree.len() < slots {
            let _ = tree.push((tree.len() - 1) / 2, random(), 0.0);
        }
        let mut mask = AncestorMask::new();
        mask.build(&tree);
        let mask = (!tree.is_chain()).then_some(mask);
        Sequence { target, tree, mask }
    };
    (0..SEQUENCES).map(&mut sequence).collect()
}

fn one_by_one(sequences: &mut [Sequence], picks: &mut [Vec<u32>]) {
    for (Sequence { target, tree, mask }, picks) in sequences.iter_mut().zip(picks) {
        picks.clear();
        let round = Round::new(PROMPT, tree, mask.as_ref());
        target.verify(&round, &mut Picks::new(picks)).unwrap();
    }
}

fn together(sequences: &mut [Sequence], picks: &mut [Vec<u32>]) {
    let entries = sequences.iter_mut().zip(picks).map(|(sequence, picks)| {
        picks.clear();
        let Sequence { target, tree, mask } = sequence;
        let round = Round::new(PROMPT, tree, mask.as_ref());
        BatchEntry { target, round, picks: Picks::new(picks) }
    });
    verify_batch(&mut Vec::from_iter(entries)).unwrap();
}

fn benches(criterion: &mut Criterion) {
    let model = model();
    let mut group = criterion.benchmark_group("8 sequences");
    group.sample_size(20);
    for slots in [16, 1] {
        let mut sequences = sequences(&model, slots);
        let (mut picks, mut expected) = (vec![Vec::new(); SEQUENCES], vec![Vec::new(); SEQUENCES]);
        one_by_one(&mut sequences, &mut expected);
        together(&mut sequences, &mut picks);
        assert_eq!(picks, expected);
        group.bench_function(format!("{slots} slots, one by one"), |b| {
            b.iter(|| one_by_one(&mut sequences, &mut picks));
        });
        group.bench_function(format!("{slots} slots, batch"), |b| {
            b.iter(|| together(&mut sequences, &mut picks));
        });
    }
    group.finish();
}

criterion_group!(group, benches);
criterion_main!(group);
