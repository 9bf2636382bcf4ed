//! Figures of several runs, and tables of them.

use std::fmt::{self, Write};

use serde_json::{Value, json};

/// The middle of several runs, and how far they lie apart.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    pub median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    /// Of at least one value.
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let (low, high) = ((values.len() - 1) / 2, values.len() / 2);
        Self {
            median: (values[low] + values[high]) / 2.0,
            min: values[0],
            max: values[values.len() - 1],
        }
    }

    pub fn json(self) -> Value {
        json!({ "median": self.median, "min": self.min, "max": self.max })
    }

    pub fn show(self, digits: usize) -> String {
        let Self { median, min, max } = self;
        format!("{median:.digits$} ({min:.digits$}..{max:.digits$})")
    }
}

/// Writes a table with a line for the head, and an empty line after it; numbers are to the right.
pub fn table(out: &mut dyn Write, head: &[&str], rows: Vec<Vec<String>>) -> fmt::Result {
    let mut lines = vec![head.iter().map(|&cell| cell.to_owned()).collect::<Vec<_>>()];
    lines.extend(rows);
    let widths: Vec<usize> = (0..head.len())
        .map(|column| lines.iter().map(|line| line[column].len()).max().unwrap_or(0))
        .collect();
    for line in lines {
        let mut text = format!("{:<width$}", line[0], width = widths[0]);
        for (cell, width) in line.iter().zip(&widths).skip(1) {
            text += &format!("  {cell:>width$}");
        }
        writeln!(out, "{}", text.trim_end())?;
    }
    writeln!(out)
}
