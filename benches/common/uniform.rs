/// Numbers in (0, 1], the same ones for a state on every machine. The state is not 0.
pub fn uniform(mut state: u64) -> impl FnMut() -> f32 {
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 + 1.0) / (1 << 24) as f32
    }
}
