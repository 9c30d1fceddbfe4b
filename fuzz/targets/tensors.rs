//! Messages with tensors: the result does not depend on the split into segments and equals that of a usual
//! codec, and memory is bounded by the number of bytes.

#![no_main]

use bytes::{Buf, Bytes};
use libfuzzer_sys::fuzz_target;
use prost::Message;
use steadfast_fuzz::{seeds, split, within};
use steadfast_proto::v1::push_header::Name;
use steadfast_proto::v1::{BlockData, LaneContribution, LaneShare, PushHeader, PushRequest};
use steadfast_proto::{Decoder, encode};

/// An empty share in a header takes sixteen bytes in memory for two on the wire, and the list grows by
/// doubling.
const TIMES_MAX: usize = 64;

/// The header and the blocks, or the error.
type Found = Result<(Option<Vec<u8>>, Vec<(u32, Vec<u8>)>), String>;

fuzz_target!(init: seeds("tensors", well_formed()), |data: &[u8]| {
    let Some((how, bytes)) = data.split_first() else { return };
    let whole = read(split(bytes, 0));
    assert_eq!(read(split(bytes, *how)), whole);
    let Ok(found) = whole else { return };
    if let Some(known) = by_codec(bytes) {
        assert_eq!(found, known);
    }
});

fn read(segments: Vec<Bytes>) -> Found {
    let len: usize = segments.iter().map(Bytes::len).sum();
    within(TIMES_MAX * len + (64 << 10), || {
        let mut decoder = Decoder::<PushHeader>::default();
        let mut blocks = Vec::new();
        for segment in segments {
            let fed = decoder.feed(segment, |_, number, data| {
                blocks.push((number, data.joined().to_vec()));
                Ok(())
            });
            fed.map_err(|status| status.to_string())?;
        }
        let header = decoder.end().map_err(|status| status.to_string())?;
        Ok((header.map(|it| it.encode_to_vec()), blocks))
    })
}

/// The header of a push and its blocks, each with its number.
type Push = (Option<Vec<u8>>, Vec<(u32, Vec<u8>)>);

/// The result of a usual gRPC codec, which decodes whole messages; `None` if it rejects them.
fn by_codec(mut bytes: &[u8]) -> Option<Push> {
    let (mut header, mut blocks) = (None, Vec::new());
    while !bytes.is_empty() {
        bytes.advance(1);
        let len = bytes.get_u32() as usize;
        let message = PushRequest::decode(&bytes[..len]).ok()?;
        bytes.advance(len);
        if let Some(more) = message.header {
            let header: &mut PushHeader = header.get_or_insert_default();
            header.merge(&more.encode_to_vec()[..]).ok()?;
        }
        blocks.extend(message.blocks.into_iter().map(|it| (it.block, it.data.to_vec())));
    }
    Some((header.map(|it| it.encode_to_vec()), blocks))
}

fn well_formed() -> Vec<Vec<u8>> {
    let shares = vec![LaneShare { records: 7, last: true, checksum: 5, weight: None }; 3];
    let lanes = LaneContribution { version: 3, lane: 4, shares, reductions: 2 };
    let header = PushHeader {
        rows: 0,
        records: 21,
        loss_sum: 0.5,
        name: Some(Name::Lanes(lanes)),
        ..PushHeader::default()
    };
    let block = |block, len| BlockData { block, data: vec![1; len].into() };
    let mut segments = Vec::new();
    encode(Some(&header), &[block(0, 8), block(300, 40)], &mut segments);
    encode(None::<&PushHeader>, &[block(2, 0)], &mut segments);
    let bytes = segments.concat();
    [0, 1, 2].map(|how| [&[how], &bytes[..]].concat()).to_vec()
}
