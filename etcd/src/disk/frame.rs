//! The unit of writing: a length, two checksums, and the payload.
//!
//! One frame is one commit. A frame is written only after the previous one is on disk, so a crash can
//! damage only the last frame. This distinguishes a torn tail (an invalid frame with no valid one after
//! it, never acknowledged) from corruption (an invalid frame with valid ones after it).
//!
//! ```text
//! | payload length: u64 | crc32 of payload: u32 | crc32 of the 12 bytes before: u32 | payload |
//! ```
//! All numbers are little-endian.

pub const HEADER_BYTES: usize = 16;

/// Returns the header of a frame that holds `payload`.
pub fn header(payload: &[u8]) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    let length = u64::try_from(payload.len()).expect("a length fits 64 bits");
    header[..8].copy_from_slice(&length.to_le_bytes());
    header[8..12].copy_from_slice(&crc32fast::hash(payload).to_le_bytes());
    let checksum = crc32fast::hash(&header[..12]);
    header[12..].copy_from_slice(&checksum.to_le_bytes());
    header
}

/// Returns the payload of the frame at the start of `bytes`, if it is complete and valid.
pub fn payload(bytes: &[u8]) -> Option<&[u8]> {
    let (header, rest) = bytes.split_first_chunk::<HEADER_BYTES>()?;
    if number(&header[12..]) != crc32fast::hash(&header[..12]) {
        return None;
    }
    let (length, _) = header.split_first_chunk::<8>()?;
    let payload = rest.get(..usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    (number(&header[8..12]) == crc32fast::hash(payload)).then_some(payload)
}

/// Returns whether a valid frame starts anywhere in `bytes`.
pub fn is_anywhere_in(bytes: &[u8]) -> bool {
    (0..bytes.len()).any(|offset| payload(&bytes[offset..]).is_some())
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes.try_into().expect("a checksum is four bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn framed(payload: &[u8]) -> Vec<u8> {
        [&header(payload)[..], payload].concat()
    }

    /// A checksum covers every bit of a frame.
    #[test]
    fn a_frame_with_any_bit_flipped_is_rejected() {
        let frame = framed(b"hello");
        assert_eq!(payload(&frame), Some(&b"hello"[..]));
        for bit in 0..frame.len() * 8 {
            let mut bad = frame.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(payload(&bad), None, "bit {bit}");
        }
    }

    /// A truncated frame of any length is refused without a panic.
    #[test]
    fn a_truncated_frame_is_rejected() {
        let frame = framed(b"hello");
        for length in 0..frame.len() {
            assert_eq!(payload(&frame[..length]), None, "{length}");
        }
    }

    /// The bytes after an invalid frame decide between a torn tail and corruption.
    #[test]
    fn a_valid_frame_is_found_behind_a_damaged_one() {
        let mut two = framed(b"first");
        two[3] ^= 0xff;
        assert!(!is_anywhere_in(&two));
        two.extend(framed(b"second"));
        assert!(is_anywhere_in(&two));
    }
}
