//! What the engine refuses, and that it goes on afterwards.

use candle_core::{DType, Device};

use super::{FilePath, TINY, gpu, pair, tiny};
use crate::candle::cuda::{CudaDFlash, CudaOptions, CudaTaps, CudaTarget};
use crate::candle::dflash::DFlashConfig;
use crate::candle::{DecoderConfig, Error, RopeScaling, Weights};
use crate::{
    Acceptance, AncestorMask, CommitPlan, Committed, DraftTree, Drafter, Picks, Prefill, Proposal,
    ProposalRequest, Round, Verifier, walk,
};

/// The name of the argument or field that was refused.
#[track_caller]
fn refused<T>(result: Result<T, Error>) -> String {
    match result {
        Err(Error::Argument { name, .. }) => name.to_string(),
        Err(Error::Config { field, .. }) => field.to_string(),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("not refused"),
    }
}

fn tiny_config() -> DecoderConfig {
    DecoderConfig::load(FilePath::new(TINY).join("target")).unwrap()
}

fn weights(part: &str) -> Weights {
    Weights::open(FilePath::new(TINY).join(part), DType::F32, &Device::Cpu).unwrap()
}

#[test]
fn targets_that_cannot_be() {
    let Some(gpu) = gpu() else { return };
    let new = |change: &dyn Fn(&mut DecoderConfig), taps: &[usize], options| {
        let mut config = tiny_config();
        change(&mut config);
        refused(CudaTarget::new(&gpu, &config, weights("target"), taps, options))
    };
    let (same, options) = (|_: &mut DecoderConfig| (), CudaOptions::default().max_len(512));
    assert_eq!(new(&same, &[], options.max_len(0)), "max_len");
    assert_eq!(new(&same, &[], options.max_len(1 << 30)), "max_len");
    assert_eq!(new(&same, &[], options.max_slots(0)), "max_slots");
    assert_eq!(new(&same, &[], options.max_slots(253)), "max_slots");
    assert_eq!(new(&same, &[99], options), "taps");
    assert_eq!(new(&same, &[1, 0, 1], options), "taps");
    assert_eq!(new(&|c| c.head_dim = 32, &[], options), "head_dim");
    assert_eq!(
        new(&|c| c.layer_windows = vec![Some(64); c.num_layers()], &[], options),
        "sliding_window"
    );
    assert_eq!(new(&|c| c.rope.rotary_dim /= 2, &[], options), "rotary dimensions");
    assert_eq!(new(&|c| c.o_bias = true, &[], options), "attention_bias, mlp_bias");
}

#[test]
fn drafters_of_another_target() {
    let Some(gpu) = gpu() else { return };
    let drafter = || DFlashConfig::load(FilePath::new(TINY).join("drafter")).unwrap();
    let new =
        |target: &CudaTarget| refused(CudaDFlash::new(target, drafter(), weights("drafter"), 64));
    assert_eq!(new(&tiny(&gpu, DType::F32, false).0), "dflash_config.target_layer_ids");
    let (target, config) = tiny(&gpu, DType::F32, true);
    let top_k = CudaDFlash::new(&target, config, weights("drafter"), 65);
    assert_eq!(refused(top_k), "top_k");
    let mut short = drafter();
    short.decoder.rope.scaling = RopeScaling::Dynamic { max_position: 511 };
    let short = CudaDFlash::new(&target, short, weights("drafter"), 64);
    assert_eq!(refused(short), "max_position_embeddings");
    let options = CudaOptions::default().max_len(512).max_slots(7);
    let layers = drafter().target_layer_ids().to_vec();
    let narrow = CudaTarget::new(&gpu, &tiny_config(), weights("target"), &layers, options);
    assert_eq!(new(&narrow.unwrap()), "block_size");
}

#[test]
fn calls_out_of_order_or_range() {
    let Some(gpu) = gpu() else { return };
    let (mut target, mut drafter) = pair(&gpu, DType::F32);
    let (other, _) = pair(&gpu, DType::F32);
    let mut ids = Vec::new();
    let picks = &mut Picks::new(&mut ids);
    assert_eq!(refused(target.prefill(&Prefill::new(0, &[]), picks)), "tokens");
    assert_eq!(refused(target.prefill(&Prefill::new(0, &[4096]), picks)), "tokens");
    assert_eq!(refused(target.prefill(&Prefill::new(3, &[1]), picks)), "start");
    assert_eq!(refused(target.prefill(&Prefill::new(0, &[1; 513]), picks)), "max_len");
    let prompt = [7, 8, 9];
    let taps = target.prefill(&Prefill::new(0, &prompt), picks).unwrap();
    assert_eq!(refused(target.reset(4)), "keep");
    assert_eq!(refused(target.logits(500)), "slot");

    // Observations.
    let foreign = CudaTaps { of: other.shared.clone(), blocks: Vec::new(), width: taps.width };
    assert_eq!(refused(drafter.observe(&Committed::new(0, &prompt), &foreign)), "features");
    assert_eq!(refused(drafter.observe(&Committed::new(0, &[1]), &taps)), "features");
    assert_eq!(refused(drafter.observe(&Committed::new(0, &[]), &taps)), "tokens");
    drafter.observe(&Committed::new(0, &prompt), &taps).unwrap();
    let mut propose = |root, position, horizon| {
        let request = ProposalRequest::new(root, position, horizon, 8);
        let mut proposal = Proposal::new();
        Drafter::<CudaTaps>::propose(&mut drafter, &request, &mut proposal)
            .map(|()| proposal.horizon())
    };
    assert_eq!(refused(propose(4096, 3, 7)), "root");
    assert_eq!(refused(propose(5, 3, 0)), "horizon");
    assert_eq!(refused(propose(5, 3, 8)), "horizon");
    assert_eq!(refused(propose(5, 4, 7)), "position");
    assert_eq!(propose(5, 3, 7).unwrap(), 7);

    // Rounds.
    let tree = DraftTree::from_parents(&[5, 1, 2, 3], &[-1, 0, 0, 2]).unwrap();
    let mut mask = AncestorMask::new();
    mask.build(&DraftTree::from_parents(&[5, 1], &[-1, 0]).unwrap());
    assert_eq!(refused(target.verify(&Round::new(3, &tree, Some(&mask)), picks)), "mask");
    mask.build(&tree);
    assert_eq!(refused(target.verify(&Round::new(2, &tree, Some(&mask)), picks)), "start");
    let wide = DraftTree::from_parents(&[1; 130], &(-1..129).collect::<Vec<_>>()).unwrap();
    assert_eq!(refused(target.verify(&Round::new(3, &wide, None), picks)), "slots");
    let (mut outcome, mut plan) = (Acceptance::new(), CommitPlan::new());
    walk(&tree, &[2, 0, 3, 77], &mut outcome).unwrap();
    plan.set(3, &outcome);
    assert_eq!(refused(target.commit(&plan)), "plan");
    target.verify(&Round::new(3, &tree, Some(&mask)), picks).unwrap();
    let row = target.logits(3).unwrap();
    assert_eq!(target.commit(&plan).unwrap().rows(), 3);
    // All of that left the sequence as it was.
    target.reset(3).unwrap();
    target.prefill(&Prefill::new(3, &[5, 2, 3]), picks).unwrap();
    assert!(super::distance(&target.logits(2).unwrap(), &row) < 1e-5);
    // A plan for nothing takes nothing.
    target.reset(0).unwrap();
    target.verify(&Round::new(0, &tree, Some(&mask)), picks).unwrap();
    assert_eq!(target.commit(&CommitPlan::new()).unwrap().rows(), 0);
}
