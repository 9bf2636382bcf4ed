//! The example of an engine behind flat arrays gives the same text with and without trees.

#[path = "../examples/c_engine.rs"]
mod c_engine;

use std::ptr;

use c_engine::{boundary::*, engine};

#[test]
fn trees_give_the_text_of_plain_decoding_in_fewer_passes() {
    c_engine::main();
    for first in 0..40 {
        let prompt: Vec<u32> = (first..first + 9).collect();
        let plain = engine::generate(&prompt, 80, 0);
        assert_eq!((plain.text.len(), plain.passes), (80, 80));
        for nodes in [1, 4, 15, 40] {
            let tree = engine::generate(&prompt, 80, nodes);
            assert_eq!(tree.text, plain.text, "{nodes} nodes, prompt from {first}");
            assert!(tree.passes < plain.passes);
        }
    }
}

#[test]
fn errors_cross_the_boundary_as_numbers_and_words() {
    assert!(ddtree_new(0, 10, 1, 1).is_null());
    let session = ddtree_new(50, 100, 3, 8);
    let mut batch = DdtreeBatch::default();
    // SAFETY: the session is live until it is freed; lengths are those of the arrays.
    let words = |session| unsafe {
        let mut len = 0;
        let text = ddtree_error(session, &mut len);
        String::from_utf8(std::slice::from_raw_parts(text.cast(), len).to_vec()).unwrap()
    };
    unsafe {
        assert_eq!(ddtree_needs(session), NEEDS_NOTHING);
        assert_eq!(ddtree_batch(session, &mut batch), -1);
        assert!(words(session).contains("needs nothing"), "{}", words(session));
        assert_eq!(ddtree_start(session, [1, 99].as_ptr(), 2, 10), -1);
        assert!(words(session).contains("99"), "{}", words(session));
        assert_eq!(ddtree_start(session, ptr::null(), 0, 10), -1);
        assert_eq!(ddtree_start(session, [1, 2].as_ptr(), 2, 10), 0);
        assert_eq!(ddtree_picked(session, [3].as_ptr(), 1), 0);
        let duplicates = ([5u32, 5], [-0.5f32, -0.7]);
        let status = ddtree_propose(session, duplicates.0.as_ptr(), duplicates.1.as_ptr(), 1, 2);
        assert_eq!((status, ddtree_needs(session)), (-1, NEEDS_PROPOSAL));
        let lists = ([5u32, 6], [-0.5f32, -0.7]);
        assert_eq!(ddtree_propose(session, lists.0.as_ptr(), lists.1.as_ptr(), 1, 2), 0);
        assert_eq!(ddtree_picked(session, [5, 6].as_ptr(), 2), -1, "three slots, two picks");
        assert_eq!(ddtree_picked(session, [5, 6, 7].as_ptr(), 3), 0);
        assert_eq!(ddtree_abandon(session), 0);
        assert_eq!(ddtree_needs(session), NEEDS_PROPOSAL);
        ddtree_free(session);
        ddtree_free(ptr::null_mut());
    }
}
