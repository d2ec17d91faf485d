//! Damaged files: whatever bytes a reader is given, it answers with a result or an error, never with a panic or with
//! memory that the file does not justify.

mod common;

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use common::ToyScorer;
use perplexity_eval::corpus::{CorpusPlan, CorpusText};
use perplexity_eval::evaluate::{Options, SaveTopTokens, evaluate, prepare};
use perplexity_eval::llama_base;
use perplexity_eval::manifest::Manifest;
use perplexity_eval::report::{Report, RunInfo};
use perplexity_eval::resume::{Resumable, State};
use perplexity_eval::text::Text;
use perplexity_eval::windows::{Protocol, WindowKind};
use proptest::prelude::*;

/// Where to cut, and which bytes to replace.
type Damage = (Option<u16>, Vec<(u16, u8)>);

fn damage() -> impl Strategy<Value = Damage> {
    (
        prop::option::of(any::<u16>()),
        prop::collection::vec((any::<u16>(), any::<u8>()), 0..6),
    )
}

fn damaged(good: &[u8], (cut, patches): &Damage) -> Vec<u8> {
    let mut bytes = good.to_vec();
    for (at, byte) in patches {
        let at = usize::from(*at) % bytes.len();
        bytes[at] = *byte;
    }
    if let Some(cut) = cut {
        bytes.truncate(usize::from(*cut) % (bytes.len() + 1));
    }
    bytes
}

fn plan() -> CorpusPlan {
    let tokens: Vec<u32> = (0..40).map(|i| i * 7 % 11).collect();
    let protocol = Protocol::new(WindowKind::Sliding, 10, 5).unwrap();
    CorpusPlan::from_tokens("c", protocol, [("a".into(), "d".into(), tokens)]).unwrap()
}

fn toy() -> ToyScorer {
    ToyScorer::new(11, 3.0, 1)
}

/// A good file, made once: every case damages the same bytes.
fn once(cell: &'static OnceLock<Vec<u8>>, make: impl FnOnce(&Path)) -> &'static [u8] {
    cell.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("good");
        make(&path);
        fs::read(path).unwrap()
    })
}

fn write_reference(path: &Path) {
    let options = Options {
        save_top_tokens: Some(SaveTopTokens {
            path: path.into(),
            per_position: 3,
        }),
        provenance: Some(Default::default()),
        ..Options::default()
    };
    evaluate(&plan(), &mut toy(), &options, &mut ()).unwrap();
}

const BASE_TOKENS: [u32; 8] = [0, 1, 2, 0, 1, 2, 0, 1];

fn write_base(path: &Path) {
    let shape = llama_base::Shape {
        context: 4,
        vocabulary: 3,
        chunks: 2,
    };
    let mut writer = llama_base::Writer::create(path, shape, &BASE_TOKENS).unwrap();
    (0..2).for_each(|_| writer.write_row(&[-0.5, -1.5, -2.0]).unwrap());
    writer.finish().unwrap();
}

fn batches() -> Options {
    Options {
        batch: 3,
        ..Options::default()
    }
}

fn write_state(path: &Path) {
    let mut toy = toy();
    let mut scorer = Resumable::new(&mut toy, State::open(path, "{\"a\":1}").unwrap());
    evaluate(&plan(), &mut scorer, &batches(), &mut ()).unwrap();
}

proptest! {
    #[test]
    fn top_token_references(damage in damage()) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ref");
        static GOOD: OnceLock<Vec<u8>> = OnceLock::new();
        fs::write(&path, damaged(once(&GOOD, write_reference), &damage)).unwrap();
        let options = Options { kl_reference: Some(path), ..Options::default() };
        if let Ok(results) = evaluate(&plan(), &mut toy(), &options, &mut ()) {
            let report = Report::build(&plan(), &results, RunInfo::default());
            prop_assert!(report.to_json().is_ok(), "figures stay finite");
        }
    }

    #[test]
    fn logit_bases(damage in damage()) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("base");
        static GOOD: OnceLock<Vec<u8>> = OnceLock::new();
        fs::write(&path, damaged(once(&GOOD, write_base), &damage)).unwrap();
        if let Ok(mut reader) = llama_base::Reader::open(&path)
            && reader.check_run(4, 3, &BASE_TOKENS).is_ok()
        {
            let mut row = [0.0; 3];
            while reader.read_row(&mut row).is_ok() {}
        }
    }

    #[test]
    fn state_files(damage in damage()) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        static GOOD: OnceLock<Vec<u8>> = OnceLock::new();
        fs::write(&path, damaged(once(&GOOD, write_state), &damage)).unwrap();
        let whole = evaluate(&plan(), &mut toy(), &batches(), &mut ()).unwrap();
        let mut second = toy();
        if let Ok(state) = State::open(&path, "{\"a\":1}")
            && let Ok(results) = evaluate(&plan(), &mut Resumable::new(&mut second, state), &batches(), &mut ())
        {
            prop_assert_eq!(results.overall, whole.overall);
        }
    }

    #[test]
    fn manifests_and_texts(damage in damage()) {
        let good = br#"{"corpus_id":"c","streams":[{"id":"a","domain":"d","path":"./a.txt","bytes":3}],
            "modes":{"quick":["a"],"full":["a"]}}"#;
        let bytes = damaged(good, &damage);
        if let Ok(manifest) = Manifest::parse(&bytes) {
            for stream in &manifest.streams {
                prop_assert!(!stream.path.starts_with('/') && !stream.path.split('/').any(|part| part == ".."));
            }
        }
        let valid = Text::validate(bytes.clone(), Path::new("t")).is_ok();
        prop_assert_eq!(valid, !bytes.is_empty() && std::str::from_utf8(&bytes).is_ok() && !bytes.contains(&0));
    }

    #[test]
    fn reports(damage in damage()) {
        let results = evaluate(&plan(), &mut toy(), &Options::default(), &mut ()).unwrap();
        let good = Report::build(&plan(), &results, RunInfo::default()).to_json().unwrap();
        if let Ok(text) = String::from_utf8(damaged(good.as_bytes(), &damage)) {
            let _ = Report::from_json(&text);
        }
    }
}

#[test]
fn a_directory_in_place_of_a_file_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let options = |path: &Path| Options {
        kl_reference: Some(path.into()),
        ..Options::default()
    };
    assert!(prepare(&plan(), &options(folder.path()), 11).is_err());
    assert!(CorpusText::from_text(folder.path()).is_err());
    assert!(CorpusText::from_manifest(folder.path(), "full").is_err());
    let options = Options {
        save_top_tokens: Some(SaveTopTokens {
            path: folder.path().into(),
            per_position: 3,
        }),
        ..Options::default()
    };
    assert!(evaluate(&plan(), &mut toy(), &options, &mut ()).is_err());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
