from mtp_jax.api.mappings import room_for_programs


def test_there_is_room_until_a_share_of_the_limit_is_taken():
    assert room_for_programs()
    assert not room_for_programs(1e-6)
