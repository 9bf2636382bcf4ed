//! The backend on [candle](candle_core): targets, drafters and their caches.
